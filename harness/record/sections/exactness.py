"""Probe, attribution, parity and the yes-or-no checks: everything that is decided on bytes."""

from __future__ import annotations

from harness.record.model import CaseRecord, Record
from harness.record.sections.common import acceptance_at, hash10, outcome_words
from harness.record.table import cell, code, count, plural, seconds, share, table

STAGES = ("base", "attention", "attention_mlp", "rowwise")
OPS_STATEMENT = "ops that differ on their own"
"""Name of the raw line in which an attribution case says which ops differ when each is run alone."""


def probe(record: Record, stem: str) -> str:
    """Draws and walks of the exactness probe, with the log line of the decision."""
    cases = [case for case in record.of_kind("exactness_probe") if case.draws or case.log_lines]
    if not cases:
        return ""
    parts = [
        "## Probe",
        "A block of rows against the same tokens one at a time; whole logits rows compared as bytes. For a draw that "
        "differs, the bytes are those of its first differing row.",
    ]
    for case in cases:
        parts += [f"### {cell(case.name)}"] if len(cases) > 1 else []
        rows = [
            [
                cell(draw.draw),
                count(draw.prompt_tokens),
                str(draw.block_size),
                count(draw.positions),
                "pass" if draw.passed else "**differs**",
                f"{count(draw.differing_bytes)} of {count(draw.total_bytes)}",
                "none" if draw.first_position is None else count(draw.first_position),
                seconds(draw.seconds),
            ]
            for draw in case.draws
        ]
        columns = ["Draw", ">Prompt tokens", ">Block size", ">Rows compared", "Result", ">Differing bytes"]
        parts.append(table([*columns, ">First position", ">Seconds"], rows) if rows else "")
        parts += [f"Log: {code(line)}" for line in case.log_lines]
        parts.append(f"First divergence: {cell(case.first_divergence_text)}." if case.first_divergence_text else "")
    return "\n\n".join(part for part in parts if part)


def attribution(record: Record, stem: str) -> str:
    """Stages x flag cells: the picture at a glance, every first divergence, and classic's own bytes."""
    cases = record.of_kind("attribution")
    if not cases:
        return ""
    parts = [
        "## Attribution",
        "The probe in every dispatch stage, in one child process per flag cell. A divergence outside the stages that "
        "must pass is the picture asked for, so it reads *declined as declared*.",
        _glance(cases),
        _ORDER_NOTE if any(map(_alone, cases)) else "",
        _every_cell(cases),
        _classic_bytes(cases),
        _idle_axes(cases),
        _same_kernels(cases),
    ]
    return "\n\n".join(part for part in parts if part)


_ORDER_NOTE = (
    "The first divergence is first in execution order: where RoPE differs it is named, whatever else differs behind "
    "it. *Alone* runs each op by itself, at the block's rows against one-row calls, which tells the stages apart."
)


def _alone(case: CaseRecord) -> str | None:
    """The ops that differ when each is run alone, in words; None where the run did not compare them."""
    return next((check.found for check in case.checks if check.name == OPS_STATEMENT), None)


def _stages(cases: tuple[CaseRecord, ...]) -> list[str]:
    seen = dict.fromkeys(case.cell.get("stage", "unnamed") for case in cases)
    return [stage for stage in STAGES if stage in seen] + [stage for stage in seen if stage not in STAGES]


def _glance(cases: tuple[CaseRecord, ...]) -> str:
    stages = _stages(cases)
    found = {(case.flag_cell, case.cell.get("stage", "unnamed")): case for case in cases}
    rows = []
    for flag_cell in dict.fromkeys(case.flag_cell for case in cases):
        words = [_place(found.get((flag_cell, stage))) for stage in stages]
        rows.append([cell(flag_cell), *words])
    return table(["Flags", *stages], rows)


def _place(case: CaseRecord | None) -> str:
    if case is None:
        return "not run"
    if case.first_divergence is None:
        return cell(outcome_words(case))
    found, alone = case.first_divergence, _alone(case)
    where = found.op if found.layer_kind == "final" else f"layer {found.layer} {found.layer_kind}, {found.op}"
    return cell(where if alone is None else f"{where} (alone: {alone})")


def _every_cell(cases: tuple[CaseRecord, ...]) -> str:
    rows = []
    for case in sorted(cases, key=lambda case: _stages(cases).index(case.cell.get("stage", "unnamed"))):
        rows.append(
            [
                cell(case.cell.get("stage", "unnamed")),
                cell(case.flag_cell),
                cell(outcome_words(case)),
                "0" if case.differing_bytes is None and case.outcome == "pass" else count(case.differing_bytes),
                cell(case.first_divergence_text or ("none" if case.outcome == "pass" else case.reason)),
                cell(_alone(case) or "not compared"),
            ]
        )
    columns = ["Stage", "Flags", "Outcome", ">Bytes differing in the first differing row", "First divergence", "Alone"]
    if not any(map(_alone, cases)):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return table(columns, rows)


def _classic_bytes(cases: tuple[CaseRecord, ...]) -> str:
    rows = []
    for flag_cell in dict.fromkeys(case.flag_cell for case in cases):
        mine = [case for case in cases if case.flag_cell == flag_cell]
        hashes = dict.fromkeys(case.classic_sha256 for case in mine if case.classic_sha256)
        reported = sum(case.classic_sha256 is not None for case in mine)
        same = "yes" if len(hashes) == 1 and reported == len(mine) else "**no**" if len(hashes) > 1 else "incomplete"
        rows.append(
            [cell(flag_cell), " / ".join(map(hash10, hashes)) or "not recorded", f"{reported} of {len(mine)}", same]
        )
    return table(["Flags", "SHA-256 of classic's logits", ">Stages hashed", "Same in every stage"], rows)


def _idle_axes(cases: tuple[CaseRecord, ...]) -> str:
    """Name each flag axis that changed no cell: a switch that is dead on this pair."""
    axes = dict.fromkeys(axis for case in cases for axis in case.cell if axis != "stage")
    idle = []
    for axis in axes:
        groups: dict[tuple[tuple[str, str], ...], set[object]] = {}
        for case in cases:
            rest = tuple((name, value) for name, value in case.cell.items() if name != axis)
            seen = (case.outcome, case.first_divergence_text, case.differing_bytes, case.classic_sha256)
            groups.setdefault(rest, set()).add(seen)
        if len({case.cell.get(axis) for case in cases}) > 1 and all(len(group) == 1 for group in groups.values()):
            idle.append(axis)
    if not idle:
        return ""
    return f"Changed no cell: {', '.join(cell(axis) for axis in idle)}."


def _same_kernels(cases: tuple[CaseRecord, ...]) -> str:
    """Cells that computed the same under several names; reported here, refused between arms of a benchmark."""
    groups: dict[str, list[str]] = {}
    for case in cases:
        if case.kernels_sha256:
            groups.setdefault(case.kernels_sha256, []).append(case.name.partition("[")[2].removesuffix("]"))
    if not groups:
        return ""
    same = [" and ".join(map(cell, names)) for names in groups.values() if len(names) > 1]
    found = (
        f"the same in {'; in '.join(same)}" if same else f"{len(groups)} in {plural(len(cases), 'cell')}, no two alike"
    )
    return f"Kernel fingerprints: {found}."


def parity(record: Record, stem: str) -> str:
    """MTP's token ids against classic's, per prompt and block size. No rate: nothing brackets these runs."""
    found = [(case, one) for case in record.cases for one in case.comparisons]
    if not found:
        return ""
    rows = []
    for _, one in found:
        figures = one.acceptance
        rows.append(
            [
                cell(one.prompt),
                cell(one.form),
                count(one.prompt_tokens),
                str(one.block_size),
                count(one.tokens),
                "yes" if one.identical and one.text_identical else "**no**",
                "none" if one.first_difference is None else f"token {one.first_difference}",
                count(one.distinct_tokens),
                share(figures.acceptance_length if figures else None, "no round"),
                share(figures.acceptance_rate if figures else None, "no round"),
                acceptance_at(figures) if figures else "no round",
                cell(one.finish_reason),
                _hashes(one.classic_sha256, one.mtp_sha256),
            ]
        )
    columns = ["Prompt", "Form", ">Prompt tokens", ">Block size", ">Tokens", "Same ids and text", "First difference"]
    columns += [">Distinct tokens", ">Tokens per verify", ">Accepted / drafted", "By position", "Ended by", "SHA-256"]
    same = sum(one.identical and one.text_identical for _, one in found)
    words = f"{same} of {plural(len(found), 'generation')} with classic's own token ids and text."
    return f"## Parity\n\n{words}\n\n{table(columns, rows)}"


def _hashes(classic: str, mtp: str) -> str:
    return hash10(classic) if classic == mtp else f"classic {hash10(classic)}, MTP {hash10(mtp)}"


def other_checks(record: Record, stem: str) -> str:
    """Statements of the remaining kinds, and pairs that had to decline."""
    cases = [case for case in record.cases if case.checks]
    if not cases:
        return ""
    rows = [
        [
            cell(case.name),
            cell(check.name),
            cell(check.expected),
            cell(check.found),
            "yes" if check.passed else "**no**",
        ]
        for case in cases
        for check in case.checks
        if not (check.name == OPS_STATEMENT and check.passed)  # stands in the attribution table
    ]
    if not rows:
        return ""
    parts = ["## Other checks", table(["Case", "Statement", "Expected", "Found", "Holds"], rows)]
    parts += [f"{cell(case.name)}: {code(line)}" for case in cases if case.kind == "decline" for line in case.log_lines]
    return "\n\n".join(parts)
