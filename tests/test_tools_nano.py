"""The nano trainer in small: all stages in seconds on synthetic text, and the exported pair against its oracles."""

from __future__ import annotations

import email
import json
import os
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import tools.train_nano_pair as trainer
from tools.nano import evaluate, export
from tools.nano.chat import conversations, render
from tools.nano.corpus import Document, clean_text, collect, open_licence
from tools.nano.model import head
from tools.nano.optim import orthogonalize, rate_factor
from tools.nano.shape import FULL, SLIDING, TINY, TINY_DRAFT, DraftShape, NanoShape
from tools.nano.tokens import SPECIAL, STOP_IDS
from tools.nano.train import unroll

CLOSE_FP32 = 2e-5  # two fp32 implementations of the same sums
CLOSE_BF16 = 0.25  # mlx computes in bf16 where the checkpoint is bf16; logits reach about 8
ROOT = Path(__file__).resolve().parent.parent
CHECKPOINTS = ROOT / "specs" / "checkpoints"

FUNCTION = '''
def shift_{n}(values, amount={n}):
    """Shift every one of the values by the given amount and return a new list of {n} items.

    The input is left as it is.
    """
    result = []
    for value in values[:{n}]:
        result.append(value + amount)
    return result
'''


def documents(count: int = 40) -> list[Document]:
    """Synthetic sources; every fifth is held out."""
    return [
        Document("made-up", f"module_{n}.py", "".join(FUNCTION.format(n=n * 7 + k) for k in range(6)), n % 5 == 0)
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder after all stages, a few steps each."""
    work = tmp_path_factory.mktemp("nano")
    arguments = ["--tiny", "--work", str(work), "--out", str(work / "out"), "--max-steps", "12", "--candidates", "8"]
    seconds = ["--target-seconds", "60", "--drafter-seconds", "60"]
    assert trainer.main([*arguments, *seconds], (documents(), {"made-up": "MIT"})) == 0
    return work


@pytest.fixture(scope="module")
def pair(pair_folder: Path) -> evaluate.Pair:
    """The exported pair, dequantized to fp32."""
    target = export.load_weights(pair_folder / "out" / trainer.TARGET_NAME, TINY, torch.float32)
    drafter = export.load_weights(pair_folder / "out" / trainer.DRAFTER_NAME, TINY_DRAFT, torch.float32)
    return evaluate.Pair(TINY, target, TINY_DRAFT, drafter, "cpu")


def sample_tokens(length: int = 70) -> torch.Tensor:
    """Ids [1, length], longer than two windows of the tiny shape."""
    ids = torch.randint(0, TINY.vocab_size, (1, length), generator=torch.Generator().manual_seed(3))
    ids[0, 0] = 2
    return ids


def test_training_learns(pair_folder: Path) -> None:
    """A gradient that does not reach the masters leaves the loss at its start, ln(512) = 6.24; rates that follow the
    clock in a run that ends by its steps leave it near there on a fast machine."""
    state = json.loads((pair_folder / "state.json").read_text(encoding="utf-8"))
    assert state["target"]["steps"] == 12
    assert state["target"]["last_loss"] < 4.5
    assert state["drafter"]["last_loss"] < 5.5
    assert len(state["evaluate"]["held_raw"]["agreement"]) == 3
    assert 1.0 <= state["evaluate"]["held_raw"]["tokens_per_round"] <= 4.0


def test_checkpoint_folders_are_complete(pair_folder: Path) -> None:
    """A loader elsewhere needs every file, and an index that names every tensor exactly once."""
    for name, tokenizer in ((trainer.TARGET_NAME, True), (trainer.DRAFTER_NAME, False)):
        folder = pair_folder / "out" / name
        names = {path.name for path in folder.iterdir()}
        assert {"config.json", "generation_config.json", "model.safetensors.index.json", "README.md"} <= names
        assert ({"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names) == tokenizer
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert config["quantization"] == config["quantization_config"]
        assert config["eos_token_id"] == STOP_IDS


def test_target_equals_transformers(pair: evaluate.Pair) -> None:
    """Any slip in norms, RoPE, values-from-keys or the soft cap moves the logits far more than rounding does."""
    model = hugging_face_target(pair)
    tokens = sample_tokens()
    runner, _ = pair.runners(tokens.shape[1])
    hidden, shared = runner.target(pair.target, tokens)
    logits = head(hidden, pair.target["model.embed_tokens.weight"], TINY.softcap)
    with torch.no_grad():
        theirs = model(tokens, output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
    assert float((theirs.logits - logits).abs().max()) < CLOSE_FP32
    assert float((theirs.hidden_states[-1] - hidden).abs().max()) < CLOSE_FP32
    for kind in (SLIDING, FULL):
        keys, values = theirs.shared_kv_states[kind][:2]
        width = min(keys.shape[2], shared[kind][0].shape[2])
        assert float((keys[:, :, -width:] - shared[kind][0][:, :, -width:]).abs().max()) < CLOSE_FP32
        assert float((values[:, :, -width:] - shared[kind][1][:, :, -width:]).abs().max()) < CLOSE_FP32


def test_unrolled_drafts_equal_transformers(pair: evaluate.Pair) -> None:
    """A drafter trained at a shifted position, or on a row more or less of the window, drafts worse at run time."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle (pip install '.[test]')")
    config = json.loads(json.dumps(export.text_config(TINY_DRAFT)))
    assistant = transformers.Gemma4UnifiedAssistantForCausalLM(
        transformers.Gemma4UnifiedAssistantConfig(
            backbone_hidden_size=TINY_DRAFT.backbone_hidden_size, text_config=text_model_config(config)
        )
    ).eval()
    missing = assistant.load_state_dict(dict(pair.drafter), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    assistant.tie_weights()
    tokens = sample_tokens()
    target, drafter = pair.runners(tokens.shape[1])
    outputs, hidden = unroll(target, drafter, pair.target, pair.drafter, tokens)
    _, shared = target.target(pair.target, tokens)
    embedded = target.embed(pair.target, tokens)
    committed = 40
    first = {SLIDING: committed - TINY.sliding_window, FULL: 0}
    seen = {kind: tuple(t[:, :, first[kind] : committed] for t in shared[kind]) for kind in (SLIDING, FULL)}
    g = hidden[:, committed - 1 : committed]
    for step, y in enumerate(outputs):
        token = embedded[:, committed + step : committed + step + 1]
        with torch.no_grad():
            theirs = assistant(
                inputs_embeds=torch.cat([token, g], -1),
                position_ids=torch.tensor([[committed - 1]]),
                shared_kv_states=seen,
                attention_mask=None,
            )
        ours = y[:, committed - 1] @ pair.drafter["model.embed_tokens.weight"].T
        assert float((theirs.logits[:, 0] - ours).abs().max()) < CLOSE_FP32
        g = theirs.last_hidden_state


def test_mlx_loads_the_target(pair_folder: Path, pair: evaluate.Pair) -> None:
    """The format's own loader must find every tensor, every bit width and the same function."""
    mx = pytest.importorskip("mlx.core", reason="mlx is the format's own implementation (pip install '.[test]')")
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm loads the target (pip install '.[test]')")
    model, _ = utils.load_model(pair_folder / "out" / trainer.TARGET_NAME)
    tokens = sample_tokens()
    theirs = torch.tensor(model(mx.array(tokens.numpy())).astype(mx.float32).tolist())
    runner, _ = pair.runners(tokens.shape[1])
    hidden, _ = runner.target(pair.target, tokens)
    logits = head(hidden, pair.target["model.embed_tokens.weight"], TINY.softcap)
    assert float((theirs - logits).abs().max()) < CLOSE_BF16
    assert float((theirs.argmax(-1) == logits.argmax(-1)).float().mean()) > 0.9


def test_cached_generation_equals_whole_sequences(pair: evaluate.Pair) -> None:
    """A cache slot off by one, or padding seen by a shorter prompt, changes the greedy text."""
    prompts = [sample_tokens()[0, :20].tolist(), sample_tokens()[0, :41].tolist()]
    for prompt, text in zip(prompts, evaluate.generate(pair, prompts, 25), strict=True):
        whole = torch.tensor([[*prompt, *text]])
        runner, _ = pair.runners(whole.shape[1])
        hidden, _ = runner.target(pair.target, whole)
        chosen = head(hidden, pair.target["model.embed_tokens.weight"], TINY.softcap).argmax(-1)
        assert chosen[0, len(prompt) - 1 : -1].tolist() == text


@pytest.mark.parametrize(
    ("rows", "count", "accepted"),
    [
        ([[1, 1, 1]] * 20, 9, [3, 3]),
        ([[0, 1, 1]] * 20, 4, [0, 0, 0]),
        ([[1, 0, 1]] * 20, 6, [1, 1, 0]),
        ([[1, 1, 1]] * 20, 7, [3, 1]),
        ([[1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 0, 0], [0] * 3, [0] * 3], 7, [2, 1, 0]),
    ],
)
def test_walk_counts_rounds_as_the_loop_does(rows: list[list[int]], count: int, accepted: list[int]) -> None:
    """Agreement after a miss must not count, and the text's end cuts the last round."""
    assert evaluate.walk(torch.tensor(rows).bool(), 0, count) == (accepted, 3 * len(accepted))


def test_tokenizer_keeps_any_text(pair_folder: Path) -> None:
    """Gemma's ids are what stop tokens and templates rely on; bytes outside the training text must survive."""
    tokenizer = Tokenizer.from_file(str(pair_folder / "tokenizer.json"))
    for token, index in SPECIAL.items():
        assert tokenizer.token_to_id(token) == index
        assert tokenizer.encode(token, add_special_tokens=False).ids == [index]
    every_char = "".join(chr(i) for i in [*range(0x20, 0x250), 0x65E5, 0x1F389, 0xE000, 0x10FFFF, *range(32)])
    for text in (every_char, "\r\n\t  \n\n    x  ", "日本語 é ☃\u0301", "<bos><|turn>user\nhi<turn|>\n", ""):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert max(ids, default=0) < TINY.vocab_size
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_conversations_ask_for_what_the_docstring_says() -> None:
    """The model turn must not repeat the question's docstring, and decorators and indentation must not leak."""
    source = "import os\n\n\nclass Box:\n    @staticmethod\n" + "\n".join(
        "    " + line if line else line for line in FUNCTION.format(n=3).strip().splitlines()
    )
    for other in range(40):
        for turns in conversations(source.replace("shift_3", f"shift_{other}")):
            assert [role for role, _ in turns[:2]] == ["user", "model"]
            assert "@staticmethod" not in turns[1][1]
            text = render(turns)
            assert text.startswith("<bos><|turn>user\n")
            assert text.endswith("<turn|>\n")
            assert text.count("Shift every one") == 1 + text.count("<|turn>user\n", 20)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"License-Expression": "MIT"}, True),
        ({"License-Expression": "Apache-2.0 WITH LLVM-exception AND BSD-3-Clause"}, True),
        ({"License-Expression": "MIT AND GPL-3.0-only"}, False),
        ({"License-Expression": "LicenseRef-NVIDIA-Proprietary"}, False),
        ({"Classifier": "License :: OSI Approved :: BSD License"}, True),
        ({"Classifier": "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)"}, False),
        ({"Classifier": "License :: Other/Proprietary License"}, False),
        ({"License": "Apache 2.0"}, True),
        ({"License": "MIT or GPL"}, False),
        ({"License": "see LICENSE file"}, False),
        ({}, False),
    ],
)
def test_only_open_licences_are_read(fields: dict[str, str], expected: bool) -> None:
    """A mixed or unknown licence must not slip through on one good word."""
    text = "Metadata-Version: 2.1\nName: x\n" + "".join(f"{key}: {value}\n" for key, value in fields.items())
    assert (open_licence(email.message_from_string(text)) is not None) == expected


def test_duplicates_and_foreign_heads_are_dropped(tmp_path: Path) -> None:
    """Copied files would put held-out text into training; a copyleft head overrides the package's metadata."""
    body = "".join(f"value_{n} = {n * n}  # line {n}\n" for n in range(40))
    for name, text in (("a.py", body), ("b.py", body + "\n\n"), ("c.py", body.replace("value", "other"))):
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = collect(("p", path.name, path) for path in sorted(tmp_path.iterdir()))
    assert {document.name for document in found} == {"a.py", "c.py"}
    assert clean_text(body.encode()) is not None
    assert clean_text(b"# GNU General Public License\n" + body.encode()) is None
    assert clean_text(b"x" * 500) is None
    assert clean_text(b"\xff\xfe" + body.encode()) is None


def test_orthogonalized_updates_have_unit_singular_values() -> None:
    """Without the transpose for tall matrices the iteration diverges."""
    for size in ((3, 8, 24), (2, 24, 8), (1, 16, 16)):
        update = torch.randn(size, generator=torch.Generator().manual_seed(1))
        values = torch.linalg.svdvals(orthogonalize(update, steps=8))
        assert float(values.max()) < 1.35
        assert float(values.min()) > 0.4


def test_rate_ends_low_and_starts_high() -> None:
    """A schedule in steps would never reach its end on a slower machine."""
    assert rate_factor(0.1) == 1.0
    assert rate_factor(0.999) < 0.05
    assert rate_factor(0.0) < 0.1


def hugging_face_target(pair: evaluate.Pair) -> torch.nn.Module:
    """transformers' model with the pair's target weights, eager attention, fp32."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle (pip install '.[test]')")
    config = text_model_config(json.loads(json.dumps(export.text_config(TINY))))
    model: torch.nn.Module = transformers.Gemma4UnifiedForCausalLM(config).eval()
    missing = model.load_state_dict(dict(pair.target), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def text_model_config(fields: dict[str, object]) -> object:
    """transformers' text config from our config.json fields."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle (pip install '.[test]')")
    config = transformers.Gemma4UnifiedTextConfig(
        **{key: value for key, value in fields.items() if key not in ("model_type", "dtype")}
    )
    config._attn_implementation = "eager"
    return config


def committed_bytes(pair: str) -> int:
    """Size of everything under specs/checkpoints that belongs to a pair."""
    return sum(path.stat().st_size for path in CHECKPOINTS.rglob("*") if path.is_file() and pair in str(path))


def test_committed_checkpoints_keep_their_limits() -> None:
    """Shards of 8 MB or a pair over 16 MB (of the second family, 2 MB) would make every clone pay."""
    limits = {"gemma4-nano": 16_000_000, "qwen35-nano": 2_000_000}
    assert {folder.name for folder in CHECKPOINTS.iterdir()} == {
        "gemma4-nano-it-4bit", "gemma4-nano-it-assistant-4bit", "qwen35-nano-4bit", "qwen35-nano-dflash"
    }  # fmt: skip
    for pair, limit in limits.items():
        assert 0 < committed_bytes(pair) <= limit, pair
    for shard in CHECKPOINTS.rglob("*.safetensors"):
        assert shard.stat().st_size < 8_000_000
        assert os.access(shard, os.R_OK)


def test_committed_pair_holds_every_tensor_of_its_shape() -> None:
    """A shape constant edited after training would describe a pair that is not the committed one."""
    target = export.load_weights(CHECKPOINTS / trainer.TARGET_NAME, NanoShape(), torch.bfloat16)
    drafter = export.load_weights(CHECKPOINTS / trainer.DRAFTER_NAME, DraftShape(), torch.bfloat16)
    for shape, weights in ((NanoShape(), target), (DraftShape(), drafter)):
        assert {name: tuple(value.shape) for name, value in weights.items()} == shape.parameters()
    config = json.loads((CHECKPOINTS / trainer.TARGET_NAME / "config.json").read_text(encoding="utf-8"))
    assert config == json.loads(json.dumps(export.model_config(NanoShape())))


def test_cards_name_no_machine() -> None:
    """A card travels with the weights: no home folder, host or temporary path belongs in it."""
    cards = list(CHECKPOINTS.rglob("README.md"))
    assert len(cards) == 4
    for card in cards:
        assert not re.search(r"/(home|root|tmp|work|opt)/", card.read_text(encoding="utf-8"))
