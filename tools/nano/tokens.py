"""Byte-level BPE tokenizer with Gemma's special tokens at Gemma's own ids.

`train_tokenizer` learns the merges; `tokenizer_files` gives the files that a checkpoint folder needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL: dict[str, int] = {
    "<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4,
    "<|tool>": 46, "<tool|>": 47, "<|tool_call>": 48, "<tool_call|>": 49,
    "<|tool_response>": 50, "<tool_response|>": 51, '<|"|>': 52,
    "<|think|>": 98, "<|channel>": 100, "<channel|>": 101, "<|turn>": 105, "<turn|>": 106,
}  # fmt: skip
STOP_IDS = [1, 106, 50]
PIECES = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+ *(?= \S)|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{%- if role not in ('system', 'user', 'model') -%}
{{- raise_exception('unknown role: ' ~ message['role']) -}}
{%- endif -%}
{{- '<|turn>' ~ role ~ '\\n' ~ (message['content'] | trim) ~ '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|turn>model\\n' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges on texts, then lay the vocabulary out around the special ids.

    Raises ValueError where vocab_size leaves no room for the bytes and the special tokens.
    """
    if vocab_size < len(SPECIAL) + 256:
        raise ValueError(f"vocab_size {vocab_size} is under {len(SPECIAL) + 256}, the special tokens and the bytes")
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=24,
    )
    learner.train_from_iterator(texts, trainer)
    state = json.loads(learner.to_str())["model"]
    pieces = sorted(state["vocab"], key=state["vocab"].__getitem__)
    free = iter(i for i in range(vocab_size) if i not in set(SPECIAL.values()))
    vocab = {**SPECIAL, **{piece: next(free) for piece in pieces}}
    taken = set(vocab.values())
    vocab.update({f"<unused{i}>": i for i in range(vocab_size) if i not in taken})
    merges = [tuple(m.split(" ")) if isinstance(m, str) else (m[0], m[1]) for m in state["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def _pre_tokenizer() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """File name -> text: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "chat_template.jinja": CHAT_TEMPLATE,
    }
