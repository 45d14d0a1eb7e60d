"""Text to token ids and back, with the checkpoint's chat form.

Wraps a checkpoint's tokenizer.json; the chat template is the checkpoint's own when it ships one, else Gemma's turn
form. `<bos>` is added once, whether or not the tokenizer adds it itself; a family that has none says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import CheckpointError, RequestError
from engine.files import read_json_object, read_text, where

BUILTIN_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{%- if role not in ['system', 'user', 'model'] -%}
{{ raise_exception("role '" ~ message['role'] ~ "' is none of system, user, assistant") }}
{%- endif -%}
{{- '<|turn>' ~ role ~ '\\n' ~ message['content'] | trim ~ '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|turn>model\\n' -}}
{%- endif -%}
"""
"""Gemma 4's turns, for a checkpoint without a template of its own."""


@dataclass(frozen=True)
class ChatPrompt:
    """Ids of a rendered chat; `history_boundary` counts those before the generation part."""

    ids: tuple[int, ...]
    history_boundary: int


class Tokenizer:
    """Encodes prompts and decodes output with one checkpoint's vocabulary."""

    def __init__(
        self, backend: Any, template: str = BUILTIN_TEMPLATE, bos: str | None = "<bos>", stop_ids: Sequence[int] = ()
    ) -> None:
        """`backend` is a `tokenizers.Tokenizer`; `bos` must be in its vocabulary, or None: prompts start without."""
        self._backend = backend
        self._bos = bos or ""
        bos_id = backend.token_to_id(bos) if bos is not None else None
        if bos is not None and bos_id is None:
            raise CheckpointError(f"tokenizer.json: has no token {bos!r}; every prompt starts with it")
        self.bos_id: int | None = bos_id
        self.stop_ids: tuple[int, ...] = tuple(stop_ids)
        self._template = _compile(template)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return int(self._backend.get_vocab_size())

    def encode_raw(self, text: str, bos: bool = True) -> tuple[int, ...]:
        """Ids of plain text, with one `<bos>` in front unless `bos` is False or there is none."""
        ids = tuple(self._backend.encode(text, add_special_tokens=False).ids)
        if bos and self.bos_id is not None and ids[:1] != (self.bos_id,):
            ids = (self.bos_id, *ids)
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]], generation_prompt: bool = True) -> ChatPrompt:
        """Ids of a chat of {"role", "content"} messages, and where its history ends.

        Raises RequestError when the template refuses the messages.
        """
        history = self.encode_raw(self._render(messages, False))
        if not generation_prompt:
            return ChatPrompt(history, len(history))
        ids = self.encode_raw(self._render(messages, True))
        boundary = 0
        for ours, theirs in zip(history, ids, strict=False):
            if ours != theirs:
                break
            boundary += 1
        return ChatPrompt(ids, boundary)

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """Text of token ids, special tokens left out unless `keep_special`."""
        return str(self._backend.decode(list(ids), skip_special_tokens=not keep_special))

    def _render(self, messages: Sequence[Mapping[str, str]], generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=generation_prompt,
                bos_token=self._bos,
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"chat template: {error}; check the messages' roles and contents") from error


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder.

    Reads tokenizer.json, and when present chat_template.jinja, tokenizer_config.json,
    generation_config.json and config.json. Raises CheckpointError naming the bad file.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{where(file)}: not found; a target checkpoint needs its tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers package raises bare Exception for a file that it cannot read
        raise CheckpointError(f"{where(file)}: not a tokenizer file ({error})") from error
    settings = _read_json(path / "tokenizer_config.json")
    template_file = _readable(path / "chat_template.jinja")
    template = template_file.read_text(encoding="utf-8") if template_file.is_file() else settings.get("chat_template")
    bos = settings.get("bos_token", "<bos>")  # null is an answer: Qwen's prompts begin with their first token
    if isinstance(bos, Mapping):
        bos = bos.get("content", "<bos>")
    return Tokenizer(
        backend,
        template if isinstance(template, str) else BUILTIN_TEMPLATE,
        bos if bos is None or isinstance(bos, str) else "<bos>",
        _stop_ids(path),
    )


def _stop_ids(path: Path) -> tuple[int, ...]:
    """eos_token_id of config.json (top level, then text_config), else of generation_config.json."""
    config = _read_json(path / "config.json")
    text_config = config.get("text_config")
    places = (
        config.get("eos_token_id"),
        text_config.get("eos_token_id") if isinstance(text_config, Mapping) else None,
        _read_json(path / "generation_config.json").get("eos_token_id"),
    )
    found = next((place for place in places if place is not None), ())
    ids = [found] if isinstance(found, int) else list(found) if isinstance(found, Sequence) else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise CheckpointError(f"{where(path / 'config.json')}: eos_token_id {found!r} is neither an id nor a list")
    return tuple(dict.fromkeys(ids))


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, {} when there is none."""
    return read_json_object(file) if file.is_file() else {}


def _readable(file: Path) -> Path:
    """The same path, after reading it where it is a file: CheckpointError for bytes that are no text."""
    if file.is_file():
        read_text(file)
    return file


def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"chat template: {error}") from error


def _raise_exception(message: str) -> str:
    """What a template calls to refuse its input."""
    raise jinja2.TemplateError(message)
