"""Rules that a single field cannot state: flags, ids, prompts, matrices, names. All findings, each with its place.

Runs also on a spec whose other parts are broken, so that one `harness check` shows everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from engine.flags import check_flag
from harness.errors import Problem
from harness.spec import kernel_model as km
from harness.spec import model as m
from harness.spec.matrix import Finding, expand
from harness.spec.resolve import path_problem, prompt_label, prompt_text
from harness.spec.wording import describe, nearest
from harness.spec.yaml12 import Document, Loc

_KV_KEYS = ("geometries", "layers", "contexts")
RESERVED_ARMS = ("classic", "null", "open", "close")
_CHECK: TypeAdapter[m.CheckKind] = TypeAdapter(m.Check)


def problems(document: Document, path: Path) -> Iterator[Problem]:
    """Every broken rule of one spec file."""
    value = document.value
    yield from _name_problems(document, value.get("name"), path)
    yield from _pair_problems(document, value.get("pair"))
    entries = value.get("checks")
    entries = entries if isinstance(entries, tuple) else ()
    yield from _id_problems(document, entries)
    checks: list[tuple[int, m.CheckKind]] = []
    for index, entry in enumerate(entries):
        try:
            checks.append((index, _CHECK.validate_python(entry)))
        except ValidationError:
            continue
    block_size = _block_size(value.get("pair"))
    for index, check in checks:
        for loc, message in (
            *_pair_findings(check, value.get("pair")),
            *check_findings(check, path.parent, block_size),
        ):
            yield document.problem(("checks", index, *loc), message)
    if len(checks) == len(entries) and not any(isinstance(check, m.GreedyParity) for _, check in checks):
        for index, check in checks:
            if isinstance(check, m.Throughput | m.Decline | m.PeerDecode) and check.prompts is None:
                message = f"{check.kind} '{check.id}' has no prompts, and no greedy_parity check to take them from"
                yield document.problem(("checks", index), message)


def _pair_findings(check: m.CheckKind, pair: Any) -> Iterator[Finding]:
    """Whether the check has what it runs on: a pair, or shapes of its own."""
    if isinstance(check, m.KernelThroughput):
        return
    if isinstance(check, m.RowIdentity) and (check.geometry is not None or "geometry" in _fields_set(check)):
        if pair is not None:
            yield ("geometry",), "is for a spec without a pair; this one compares the pair's own shapes: leave it out"
        return
    if pair is None:
        instead = " or give the check a `geometry`" if isinstance(check, m.RowIdentity) else ""
        yield (), f"{check.kind} '{check.id}' needs a pair, and this spec has none; add `pair`{instead}"


def check_findings(check: m.CheckKind, folder: Path, block_size: int | None) -> Iterator[Finding]:
    """Everything wrong inside one check, as (path inside the check, message)."""
    yield from expand(check).findings
    for name, axis in check.matrix.items():
        base = ("matrix", name)
        if isinstance(axis, m.EnvAxis):
            yield from ((base + loc, text) for loc, text in _flag_findings(axis.env, axis.values))
        else:
            yield from ((base + loc, text) for loc, text in _field_findings(check, axis))
    for index, entry in enumerate(check.include):
        for name, value in entry.items():
            axis_ = check.matrix.get(name)
            if isinstance(axis_, m.EnvAxis) and isinstance(value, str) and (text := check_flag(axis_.env, value)):
                yield ("include", index, name), text
    for key in ("block_sizes", "rows", "ops", "must_pass", "peers", "peer_rows", "contexts", "step_contexts"):
        yield from _repeated(key, getattr(check, key, None) or ())
    match check:
        case m.Attribution():
            for index, stage in enumerate(check.must_pass):
                if stage not in check.stages:
                    yield ("must_pass", index), f"stage '{stage}' is not among this check's stages"
        case m.Geometry():
            if not check.expect.model_fields_set:
                yield ("expect",), "nothing is expected; name a field or a predicate"
        case m.KernelThroughput():
            yield from _kernel_findings(check)
        case m.RowIdentity() if check.geometry is not None:
            for index, op in enumerate(check.ops):
                if op not in m.GEMMA_OPS:
                    yield ("ops", index), f"op {op} has no shapes in a geometry, only in a Qwen 3.5 pair"
        case m.PeerDecode():
            yield from _peer_findings(check, folder)
        case m.Generating():
            yield from _generating_findings(check, folder, block_size)
        case _:
            pass


def _fields_set(check: m.CheckKind) -> set[str]:
    """Fields that some axis of the check sets."""
    return {axis.field for axis in check.matrix.values() if isinstance(axis, m.FieldAxis)}


def _kernel_findings(check: m.KernelThroughput) -> Iterator[Finding]:
    """Keys of the other op, and bars on what is not measured."""
    wanted, foreign = (("shapes",), ("geometries", "contexts")) if check.op == "qmv" else (_KV_KEYS, ("shapes",))
    for key in wanted:
        if not getattr(check, key):
            yield (), f"{check.kind} '{check.id}' of op {check.op} needs `{key}`"
    for key in foreign:
        if getattr(check, key):
            yield (key,), f"`{key}` is not for op {check.op}; leave it out"
    if check.op == "attention" and (extra := [peer for peer in check.peers if peer != "stream"]):
        yield ("peers",), f"{', '.join(extra)}: a matrix product is no peer of attention; only stream is"
    bars: list[tuple[Loc, km.Bars]] = [(("bars",), check.bars)]
    bars += [(("shapes", place, "bars"), shape.bars) for place, shape in enumerate(check.shapes) if shape.bars]
    for loc, found in bars:
        yield from ((loc + inner, text) for inner, text in _bar_findings(check, found))


def _bar_findings(check: m.KernelThroughput, bars: km.Bars) -> Iterator[Finding]:
    """A bar on a figure that the check does not measure would never be judged."""
    needs = {"min_stream_share": 1, "max_m4_over_m1": 4, "max_m8_over_m1": 8, "min_four_over_one": 4}
    for key, rows in needs.items():
        for count in sorted({1, rows}):
            if getattr(bars, key) is not None and count not in check.rows:
                yield (key,), f"needs times at {count} rows; add {count} to `rows`"
    if bars.min_stream_share is not None and "stream" not in check.peers:
        yield ("min_stream_share",), "needs the stream's rate; add stream to `peers`"
    for peer in km.PeerBars.model_fields:
        row_bars = bars.max_peer_ratio.of(peer) if bars.max_peer_ratio is not None else None
        if row_bars is None:
            continue
        if peer not in check.peers:
            yield ("max_peer_ratio", peer), f"{peer} is not among this check's peers"
        for rows in (1, 4, 8):
            if row_bars.at(rows) is not None and not (rows in check.rows and rows in check.peer_rows):
                yield ("max_peer_ratio", peer, f"m{rows}"), f"needs times at {rows} rows in `rows` and `peer_rows`"


def _generating_findings(check: m.Generating, folder: Path, block_size: int | None) -> Iterator[Finding]:
    if check.temperature != 0:
        text = f"temperature {check.temperature} is refused: greedy decoding only (0), sampled text has no one answer"
        yield ("temperature",), text
    if check.batch != 1:
        yield ("batch",), f"batch {check.batch} is refused: one sequence at a time (1)"
    if isinstance(check, m.GreedyParity | m.Throughput | m.Decline) and check.prompts is not None:
        yield from _prompt_findings(check.prompts, folder)
    if isinstance(check, m.Throughput):
        yield from _arm_findings(check.arms)
        if check.processes > check.repeats:
            yield ("processes",), f"{check.processes} processes share {check.repeats} repeats; each needs at least one"
    if isinstance(check, m.GreedyParity):
        sizes = check.block_sizes
        if check.min_acceptance is not None and sizes is not None and block_size not in (None, *sizes):
            yield ("min_acceptance",), f"is judged at the pair's block size {block_size}, which block_sizes leaves out"
        if check.min_distinct_tokens is not None and check.min_distinct_tokens > check.max_tokens:
            yield ("min_distinct_tokens",), f"{check.min_distinct_tokens} is more than max_tokens {check.max_tokens}"


def _peer_findings(check: m.PeerDecode, folder: Path) -> Iterator[Finding]:
    if check.prompts is not None:
        yield from _prompt_findings(check.prompts, folder)
    for peer in check.min_speedup.model_dump(exclude_none=True):
        if peer not in check.peers:
            yield ("min_speedup", peer), f"{peer} is not among this check's peers"


def _prompt_findings(prompts: Sequence[m.Prompt], folder: Path) -> Iterator[Finding]:
    labels: dict[str, int] = {}
    for index, prompt in enumerate(prompts):
        base = ("prompts", index)
        if (prompt.file is None) == (prompt.text is None):
            yield base, "a prompt has exactly one of `file` and `text`"
            continue
        try:
            prompt_text(prompt, folder)
        except ValueError as error:
            yield (*base, "file" if prompt.file is not None else "text"), str(error)
        name = prompt_label(prompt, index)
        if name in labels:
            yield base, f"prompt {labels[name] + 1} is called '{name}' too; give one of them a `name`"
        labels.setdefault(name, index)


def _arm_findings(arms: Sequence[m.Arm]) -> Iterator[Finding]:
    seen: set[str] = set()
    for index, arm in enumerate(arms):
        base = ("arms", index)
        if arm.name in RESERVED_ARMS:
            yield (*base, "name"), f"the name '{arm.name}' is taken by the harness; taken: {', '.join(RESERVED_ARMS)}"
        if arm.name in seen:
            yield (*base, "name"), f"duplicate arm '{arm.name}'"
        seen.add(arm.name)
        for flag, value in arm.env.items():
            if text := check_flag(flag, value):
                yield (*base, "env", flag), text


def _flag_findings(flag: str, values: Sequence[str | None]) -> Iterator[Finding]:
    if text := check_flag(flag, None):
        yield ("env",), text
        return
    for index, value in enumerate(values):
        if value is not None and (text := check_flag(flag, value)):
            yield ("values", index), text


def _field_findings(check: m.CheckKind, axis: m.FieldAxis) -> Iterator[Finding]:
    fields = [name for name in type(check).model_fields if name not in m.CheckBase.model_fields and name != "kind"]
    if axis.field not in fields:
        hint = nearest(axis.field, fields) or f"; fields: {', '.join(fields)}"
        yield ("field",), f"{check.kind} has no field '{axis.field}' that an axis can set{hint}"
        return
    for index, value in enumerate(axis.values):
        try:
            with_fields(check, {axis.field: value})
        except ValidationError:
            yield ("values", index), f"{describe(value)} is no value for `{axis.field}`"


def with_fields(check: m.CheckKind, fields: dict[str, m.Scalar]) -> m.CheckKind:
    """The check with some fields replaced, validated again. Raises pydantic's ValidationError."""
    return _CHECK.validate_python({**check.model_dump(by_alias=True), **fields}) if fields else check


def _repeated(key: str, values: Sequence[Any]) -> Iterator[Finding]:
    for index, value in enumerate(values):
        if value in values[:index]:
            yield (key, index), f"{value} is listed twice"


def _name_problems(document: Document, name: Any, path: Path) -> Iterator[Problem]:
    if not isinstance(name, str):
        return
    if name != path.stem:
        yield document.problem(("name",), f"name '{name}' is not the file's stem '{path.stem}'")
    for other in sorted(path.parent.glob("*.yaml")):
        if other.stem != path.stem and other.stem.startswith(name):
            message = f"name '{name}' begins the name of {other.name}: `pytest -k {name}` would run both; rename one"
            yield document.problem(("name",), message)


def _pair_problems(document: Document, pair: Any) -> Iterator[Problem]:
    for role in ("target", "drafter"):
        ref = pair.get(role) if isinstance(pair, dict) else None
        path = ref.get("path") if isinstance(ref, dict) else None
        if isinstance(path, str) and path and (text := path_problem(path, "the spec's folder or $HARNESS_MODELS")):
            yield document.problem(("pair", role, "path"), text)


def _id_problems(document: Document, entries: Sequence[Any]) -> Iterator[Problem]:
    lines: dict[str, int] = {}
    for index, entry in enumerate(entries):
        name = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            continue
        if name in lines:
            message = f"duplicate check id '{name}' (first at line {lines[name]})"
            yield document.problem(("checks", index, "id"), message)
        lines.setdefault(name, document.line(("checks", index, "id")))


def _block_size(pair: Any) -> int | None:
    size = pair.get("block_size", 4) if isinstance(pair, dict) else None
    return size if isinstance(size, int) else None
