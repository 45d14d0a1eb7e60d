"""Prompts to ids and back: one BOS, Gemma's turns, the history boundary, stop ids."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from engine.errors import CheckpointError, RequestError
from engine.tokenizer import Tokenizer, load_tokenizer

SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
BOS, TURN, END = 2, 4, 5


def byte_backend(own_bos: bool = False) -> tokenizers.Tokenizer:
    """A byte-level vocabulary without merges; with `own_bos` its post-processor adds <bos> too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    if own_bos:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return backend


PLAIN = Tokenizer(byte_backend())


def write_checkpoint(path, backend=None, **files):
    path.mkdir(exist_ok=True)
    (backend or byte_backend()).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("own_bos", [False, True], ids=["plain", "post-processor"])
@pytest.mark.parametrize("text", ["ab", "<bos>ab", ""], ids=["text", "text-with-bos", "empty"])
def test_bos_comes_exactly_once(own_bos, text):
    """Guards a double BOS, and a missing one, both of which wreck the text."""
    tokenizer = Tokenizer(byte_backend(own_bos))
    ids = tokenizer.encode_raw(text)
    assert ids[0] == BOS
    assert ids.count(BOS) == 1
    assert tokenizer.encode_raw("ab", bos=False).count(BOS) == 0


def test_a_checkpoint_that_says_null_has_no_bos(tmp_path):
    """Qwen's prompts begin with their first token; a <bos> that it never saw in training would shift every text."""
    settings = {"bos_token": None, "chat_template": "{{ bos_token }}{{ messages[0]['content'] }}"}
    tokenizer = load_tokenizer(write_checkpoint(tmp_path / "null", tokenizer_config__json=settings))
    assert tokenizer.bos_id is None
    assert tokenizer.encode_raw("ab") == PLAIN.encode_raw("ab", bos=False)
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]).ids == tokenizer.encode_raw("ab")


@given(st.text(max_size=40).filter(lambda text: not any(special in text for special in SPECIALS)))
def test_text_round_trips(text):
    """Guards a lossy decode."""
    assert PLAIN.decode(PLAIN.encode_raw(text)) == text


def test_special_tokens_are_shown_only_when_asked_for():
    """Guards <eos> in the text a user reads; text that spells a special token is that token."""
    tokenizer = Tokenizer(byte_backend())
    assert tokenizer.decode(tokenizer.encode_raw("a<eos>b"), keep_special=True) == "<bos>a<eos>b"
    assert tokenizer.decode(tokenizer.encode_raw("a<eos>b")) == "ab"


def test_builtin_template_is_gemmas_turn_form():
    """Guards the template: trimmed content, assistant spelled model, one generation prompt."""
    tokenizer = Tokenizer(byte_backend())
    chat = [
        {"role": "system", "content": " be brief "},
        {"role": "user", "content": "hi\n"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "more"},
    ]
    prompt = tokenizer.encode_chat(chat)
    assert tokenizer.decode(prompt.ids, keep_special=True) == (
        "<bos><|turn>system\nbe brief<turn|>\n<|turn>user\nhi<turn|>\n<|turn>model\nyo<turn|>\n"
        "<|turn>user\nmore<turn|>\n<|turn>model\n"
    )
    assert prompt.ids.count(BOS) == 1
    assert prompt.ids[prompt.history_boundary] == TURN
    assert prompt.ids[: prompt.history_boundary].count(TURN) == 4


def test_history_boundary_is_the_prompt_without_its_generation_part():
    """Guards the boundary that both modes prefill to in one piece."""
    tokenizer = Tokenizer(byte_backend())
    chat = [{"role": "user", "content": "abc"}]
    whole, history = tokenizer.encode_chat(chat), tokenizer.encode_chat(chat, generation_prompt=False)
    assert history.history_boundary == len(history.ids) == whole.history_boundary
    assert whole.ids[: whole.history_boundary] == history.ids
    assert len(whole.ids) > whole.history_boundary


def test_a_template_that_rewrites_history_gets_the_common_prefix():
    """Guards a boundary past the point where the two renderings part."""
    template = "{{ bos_token }}{% if add_generation_prompt %}xyz{% else %}xab{% endif %}"
    assert Tokenizer(byte_backend(), template).encode_chat([]).history_boundary == 2


def test_the_checkpoints_own_template_wins(tmp_path):
    """Guards ignoring chat_template.jinja or the template inside tokenizer_config.json."""
    inside = write_checkpoint(
        tmp_path / "inside",
        tokenizer_config__json={"chat_template": "{{ bos_token }}cfg", "bos_token": {"content": "<bos>"}},
    )
    assert load_tokenizer(inside).decode(load_tokenizer(inside).encode_chat([]).ids) == "cfg"
    beside = write_checkpoint(
        tmp_path / "beside",
        tokenizer_config__json={"chat_template": "cfg"},
        chat_template__jinja="{% for m in messages %}{% if m.content == 'no' %}{% continue %}{% endif %}"
        "{{ m.content }}{% endfor %}",
    )
    chat = [{"role": "user", "content": text} for text in ("a", "no", "b")]
    assert load_tokenizer(beside).decode(load_tokenizer(beside).encode_chat(chat).ids) == "ab"


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config__json": {"eos_token_id": [1, 5, 1]}}, (1, 5)),
        ({"config__json": {"text_config": {"eos_token_id": 1}}}, (1,)),
        ({"config__json": {}, "generation_config__json": {"eos_token_id": [5]}}, (5,)),
        ({}, ()),
    ],
    ids=["list", "text-config", "generation-config", "none"],
)
def test_stop_ids_come_from_the_checkpoint(tmp_path, files, ids):
    """Guards stopping at <eos> only, where a chat model ends its turn with another token."""
    assert load_tokenizer(write_checkpoint(tmp_path, **files)).stop_ids == ids


def test_refused_messages_say_why():
    """Guards a template error that surfaces as a jinja traceback."""
    with pytest.raises(RequestError, match="role 'tool' is none of"):
        Tokenizer(byte_backend()).encode_chat([{"role": "tool", "content": "x"}])
    with pytest.raises(RequestError, match="chat template: "):
        Tokenizer(byte_backend(), "{{ messages.a.b }}").encode_chat([])


BROKEN = {
    "missing": (lambda path: path.mkdir(), r"tokenizer\.json: not found"),
    "not-a-tokenizer": (lambda path: write_checkpoint(path, tokenizer__json="{}"), r"not a tokenizer file"),
    "bad-json": (lambda path: write_checkpoint(path, config__json="{"), r"config\.json: not valid JSON"),
    "not-an-object": (lambda path: write_checkpoint(path, config__json="[]"), r"expected a JSON object, found list"),
    "bad-eos": (lambda path: write_checkpoint(path, config__json={"eos_token_id": "x"}), r"eos_token_id 'x'"),
    "bad-template": (lambda path: write_checkpoint(path, chat_template__jinja="{% if %}"), r"^chat template: "),
    "no-bos": (
        lambda path: write_checkpoint(path, tokenizer_config__json={"bos_token": "<s>"}),
        r"has no token '<s>'",
    ),
}


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_broken_tokenizer_files_are_named(tmp_path, case):
    """Guards a traceback from a library for a damaged checkpoint."""
    make, text = BROKEN[case]
    make(tmp_path / "model")
    with pytest.raises(CheckpointError, match=text) as caught:
        load_tokenizer(tmp_path / "model")
    assert "\n" not in str(caught.value)
