"""What is generated from the models: the JSON schema for editors and the table of keys in specs/README.md.

`harness schema` writes both, `harness schema --check` refuses drift.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from engine.flags import FLAGS
from harness.spec import kernel_model as km
from harness.spec import model as m
from harness.spec import pair_model as pm
from harness.spec import speed_model as sm

SCHEMA_FILE = "spec.schema.json"
README_FILE = "README.md"
BEGIN = "<!-- BEGIN generated: keys (harness schema; do not edit) -->"
END = "<!-- END generated: keys -->"
_SHARED: tuple[tuple[str, type[BaseModel]], ...] = (
    ("Spec", m.Spec),
    ("`pair`", pm.Pair),
    ("`target`, `drafter`", pm.CheckpointRef),
    ("`requires`", m.Requires),
    ("every check", m.CheckBase),
    ("`xfail`", m.XFail),
    ("an axis that sets a flag", m.EnvAxis),
    ("an axis that sets a field", m.FieldAxis),
    ("`prompts`", m.Prompt),
    ("`arms`", m.Arm),
    ("throughput's `discard`", m.Discard),
    ("geometry's `expect`", m.GeometryExpect),
    ("throughput's `bars`", sm.StepBars),
    ("kernel_throughput's `shapes`", km.MatrixShape),
    ("kernel_throughput's `bars`", km.Bars),
    ("`max_peer_ratio`", km.PeerBars),
    ("a peer's bars", km.RowBars),
    ("peer_decode's `min_speedup`", sm.PeerSpeedups),
)


def json_schema() -> str:
    """The JSON schema of a spec, as text with sorted keys."""
    schema = m.Spec.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["$defs"]["EnvAxis"]["properties"]["env"]["enum"] = sorted(FLAGS)
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def keys_markdown() -> str:
    """Tables of every key: type, default, meaning."""
    parts: list[str] = []
    for title, model in _SHARED:
        parts += [f"### {title}", "", *_table(model, skip=set()), ""]
    common = set(m.CheckBase.model_fields)
    for kind, check in m.CHECK_MODELS.items():
        parts += [f"### `kind: {kind}`", "", f"Claim: {check.claim}.", ""]
        parts += [*_table(check, skip=(common - _changed(check)) | {"kind"}), ""]
    return "\n".join(parts).rstrip() + "\n"


def generated_files(folder: Path) -> dict[Path, str]:
    """Path -> text that should stand there; the README's hand-written part is kept as it is."""
    readme = folder / README_FILE
    old = readme.read_text(encoding="utf-8") if readme.exists() else f"# Specs\n\n{BEGIN}\n{END}\n"
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        old = f"{old.rstrip()}\n\n{BEGIN}\n{END}\n"
    head, rest = old.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    return {
        folder / SCHEMA_FILE: json_schema(),
        readme: f"{head}{BEGIN}\n\n{keys_markdown()}\n{END}{tail}",
    }


def drift(folder: Path) -> list[Path]:
    """Generated files that are missing or differ from what the models say."""
    wanted = generated_files(folder)
    return [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def _changed(check: type[BaseModel]) -> set[str]:
    """Shared keys whose default this kind changes."""
    base = m.CheckBase.model_fields
    return {name for name, field in base.items() if check.model_fields[name].default != field.default}


def _table(model: type[BaseModel], skip: set[str]) -> Iterator[str]:
    schema = model.model_json_schema(by_alias=True)
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in model.model_fields.items():
        if name in skip:
            continue
        key = field.alias or name
        prop = schema["properties"][key]
        if field.is_required():
            default = "required"
        else:
            value = field.get_default(call_default_factory=True)
            default = "none" if value is None else f"`{_compact(value)}`"
        meaning = " ".join((field.description or "").split())
        yield f"| `{key}` | {_type(prop)} | {default} | {_cell(meaning)} |"


def _compact(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    return json.dumps(value, ensure_ascii=False)


def _type(prop: dict[str, Any]) -> str:
    if "$ref" in prop:
        return "keys"
    if "const" in prop:
        return f"`{prop['const']}`"
    if "enum" in prop:
        return ", ".join(f"`{word}`" for word in prop["enum"])
    for union in ("anyOf", "oneOf"):
        if union in prop:
            kinds = [_type(option) for option in prop[union] if option.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    match prop.get("type"):
        case "array":
            items = prop.get("items") or {}
            return "list of " + _type(items) if items else "list"
        case "object":
            return "keys"
        case "integer":
            return "whole number" + _range(prop)
        case "number":
            return "number" + _range(prop)
        case "string":
            return "text"
        case "boolean":
            return "true or false"
    return "value"


def _range(prop: dict[str, Any]) -> str:
    low, high = prop.get("minimum", prop.get("exclusiveMinimum")), prop.get("maximum", prop.get("exclusiveMaximum"))
    if low is not None and high is not None:
        return f" ({low} to {high})"
    return f" (from {low})" if low is not None else ""


def _cell(text: str) -> str:
    return re.sub(r"\|", r"\\|", text)
