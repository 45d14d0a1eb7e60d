"""Small things that several sections write in the same way."""

from __future__ import annotations

from harness.record.model import CaseRecord, Record
from harness.record.speed_model import AcceptanceFigures
from harness.record.table import code, share


def hash10(sha256: str) -> str:
    """The first ten digits of a hash, as code."""
    return code(sha256[:10])


def data_link(stem: str, name: str) -> str:
    """Link to a file of the record's data folder."""
    return f"[{name}](data/{stem}/{name})"


def acceptance_at(acceptance: AcceptanceFigures) -> str:
    """Per-position acceptance, `0.71 / 0.62 / 0.60`."""
    return " / ".join(share(value) for value in acceptance.accepted_at)


def outputs_of(record: Record) -> dict[str, tuple[str, ...]]:
    """Distinct output hashes of each prompt, from timed runs and comparisons of the same length."""
    found: dict[str, dict[str, None]] = {}
    for case in record.cases:
        for prompt, hashes in case.outputs.items():
            found.setdefault(prompt, {}).update(dict.fromkeys(hashes))
    if found:
        return {prompt: tuple(hashes) for prompt, hashes in found.items()}
    for case in record.cases:
        for one in case.comparisons:
            found.setdefault(one.prompt, {}).update(dict.fromkeys((one.classic_sha256, one.mtp_sha256)))
    return {prompt: tuple(hashes) for prompt, hashes in found.items()}


def skipped_cases(record: Record) -> list[CaseRecord]:
    """Cases that were skipped, with a reason each."""
    return [case for case in record.cases if case.outcome == "skipped"]


def outcome_words(case: CaseRecord) -> str:
    """The outcome, and what makes it expected or incomplete."""
    if not case.finished:
        return "unfinished"
    return "declined as declared" if case.outcome == "declined" and case.declared else case.outcome
