"""Pydantic's findings in our words: what is wrong, what was found, and the nearest word that would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from harness.errors import Problem
from harness.spec.model import CHECK_MODELS, Spec
from harness.spec.yaml12 import Document, Loc

_SAMPLING = "; decoding is greedy, because byte identity says nothing about sampled or reweighted tokens: remove it"
_ONE = "; one sequence on one device at a time: remove it"
_BLOCK = "; block_size is it: the carried token plus the drafts, so one more than a number of drafts"
_TEXT = "; only token ids are compared and only stop ids end a text: remove it"
_BOS = "; every prompt begins with one <bos>, and `form` says whether the chat template is used: remove it"
_GREEDY_NAMES = ("top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty")
_TEXT_NAMES = ("logprobs", "prompt_logprobs", "stop", "grammar", "json_schema", "tools", "reasoning", "logit_bias")
NOT_HERE: dict[str, str] = {
    **dict.fromkeys((*_GREEDY_NAMES, "do_sample", "n"), _SAMPLING),
    **dict.fromkeys(("tensor_parallel", "data_parallel", "pipeline_parallel", "slots", "parallel", "streams"), _ONE),
    **dict.fromkeys(("num_speculative_tokens", "draft_tokens", "num_draft_tokens", "block", "K"), _BLOCK),
    **dict.fromkeys(_TEXT_NAMES, _TEXT),
    **dict.fromkeys(("bos", "add_bos", "chat_template"), _BOS),
    **dict.fromkeys(("ctx", "context"), "; the context is the checkpoint's max_position_embeddings: remove it"),
}
"""Keys that other programs have and this one refuses on purpose, with what to do instead."""

_TAGS = {*CHECK_MODELS, "env_axis", "field_axis"}


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known word, else nothing."""
    found = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean '{found[0]}'?" if found else ""


def where(loc: Loc) -> str:
    """`checks[1].matrix.multirow.values[0]` for a path into the file."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def problems_of(error: ValidationError, document: Document) -> list[Problem]:
    """One Problem per finding, at the entry it is about."""
    findings = error.errors(include_url=False)
    return [_problem(dict(details), document) for details in findings if not _follows(dict(details))]


def _follows(details: dict[str, Any]) -> bool:
    """Whether a list is only "too short" because its items are wrong, which is said already."""
    return details["type"] == "too_short" and len(details["input"]) >= int(details["ctx"]["min_length"])


def _problem(details: dict[str, Any], document: Document) -> Problem:
    full: Loc = details["loc"]
    loc = tuple(part for part in _real(full, document))
    name = str(loc[-1]) if loc else ""
    kind, found, context = details["type"], details["input"], details.get("ctx") or {}
    if kind == "extra_forbidden":
        known = sorted(_keys(full[:-1]))
        hint = NOT_HERE.get(name) or nearest(name, known) or f"; known keys: {', '.join(known)}"
        return document.problem(loc, f"unknown key '{name}'{hint}", key=True)
    if kind == "missing":
        return document.problem(loc[:-1], f"missing key '{name}'" + (f" in {where(loc[:-1])}" if loc[:-1] else ""))
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _unknown_kind(loc, found, document)
    return document.problem(loc, f"{where(loc)}: {_sentence(kind, found, context, name, details['msg'])}")


def _unknown_kind(loc: Loc, found: Any, document: Document) -> Problem:
    known = f"known kinds: {', '.join(CHECK_MODELS)}"
    tag = found.get("kind") if isinstance(found, dict) else None
    if tag is None:
        return document.problem(loc, f"{where(loc)}: missing key 'kind'; {known}")
    return document.problem((*loc, "kind"), f"unknown check kind '{tag}'{nearest(str(tag), CHECK_MODELS)}; {known}")


def _sentence(kind: str, found: Any, context: dict[str, Any], name: str, message: str) -> str:
    shown = describe(found)
    if kind == "string_type":
        quote = isinstance(found, bool | int | float)
        return f"expected text, found {shown}" + (f'; quote it: "{_plain(found)}"' if quote else "")
    if kind == "string_pattern_mismatch":
        return f"{shown} does not fit; {_pattern_hint(str(context.get('pattern')))}"
    if kind == "literal_error":
        words = [word.strip(" '") for word in str(context.get("expected", "")).replace(" or ", ", ").split(",")]
        hint = nearest(found, words) if isinstance(found, str) else ""
        return f"{shown} is not one of {', '.join(words)}{hint}"
    if kind in ("too_short", "string_too_short"):
        return "must not be empty" if context.get("min_length") == 1 else f"shorter than {context.get('min_length')}"
    expected = {
        "tuple_type": "a list",
        "dict_type": "keys and values",
        "model_type": "keys and values",
        "model_attributes_type": "keys and values",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "finite_number": "a finite number",
    }.get(kind)
    if expected:
        return f"expected {expected}, found {shown}"
    bounds = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "more than")}
    bounds |= {"less_than_equal": ("le", "at most"), "less_than": ("lt", "less than")}
    if kind in bounds:
        key, words_ = bounds[kind]
        return f"must be {words_} {context.get(key):g}, found {shown}"
    return f"{message[:1].lower()}{message[1:]}, found {shown}"


def _pattern_hint(pattern: str) -> str:
    if pattern.startswith("^>="):
        return 'write a version like ">=9.0"'
    return "use lower case letters, digits and _ . -, starting with a letter or digit"


def _plain(value: float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe(value: Any) -> str:
    """A value of the file in words, short enough for one line."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"the switch {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    return "keys and values" if isinstance(value, dict) else "a list"


def _real(loc: Loc, document: Document) -> Iterator[str | int]:
    """The parts of a validator's path that are in the file: without union tags and type names."""
    value: Any = document.value
    last = len(loc) - 1
    for index, part in enumerate(loc):
        if isinstance(value, dict):
            if part in value:
                value = value[part]
                yield part
            elif part not in _TAGS and index == last:
                yield part
        elif isinstance(value, tuple) and isinstance(part, int) and part < len(value):
            value = value[part]
            yield part


def _keys(loc: Loc) -> set[str]:
    """Keys that the model at this path knows."""
    current: list[type[BaseModel]] = [Spec]
    for part in loc:
        if part in CHECK_MODELS:
            current = [CHECK_MODELS[str(part)]]
            continue
        for model in current:
            fields = {field.alias or key: field for key, field in model.model_fields.items()}
            if part in fields:
                current = list(_models(fields[str(part)].annotation))
                break
        else:
            tagged = {"env_axis": "env", "field_axis": "field"}.get(str(part))
            current = [model for model in current if tagged is None or tagged in model.model_fields]
    return {field.alias or key for model in current for key, field in model.model_fields.items()}


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
