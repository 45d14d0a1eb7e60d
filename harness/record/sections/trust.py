"""What a figure rests on: exactness certificates, and the ledger of what was asked for against what was in force."""

from __future__ import annotations

from harness.record.model import CertificateFigures, LedgerFigures, Record
from harness.record.sections.common import hash10
from harness.record.table import cell, code, count, table

HASHES = ("target", "drafter", "source")
WORDS = {
    "target": "Target, config to weights",
    "drafter": "Drafter, config to weights",
    "source": "Code of kernels and engine",
    "compute_capability": "Compute capability",
}


def certificates(record: Record, stem: str) -> str:
    """What each passed probe proves, which arms that covers, and what it is bound to."""
    if not record.certificates:
        return ""
    rows = [
        [
            hash10(one.sha256),
            cell(one.case),
            cell(one.stage),
            str(one.block_size),
            cell(_inputs(one)),
            count(one.rows),
            count(one.total_bytes),
            count(one.walk_reach) if one.walk_reach else "no walk",
            cell(", ".join(one.covers) or "none"),
        ]
        for one in record.certificates
    ]
    columns = ["Certificate", "From", "Stage", ">Block size", "Inputs", ">Rows", ">Bytes compared", ">Walks end at"]
    return "\n\n".join(
        [
            "## Exactness certificates",
            "A probe that passed leaves one. It holds for what it is bound to and nothing else: an arm that no "
            "certificate covers has no speed-up on this page, and each rendering checks that again.",
            table([*columns, "Covers"], rows),
            _bound_to(record.certificates),
        ]
    )


def _inputs(one: CertificateFigures) -> str:
    return ", ".join(name.partition(" (")[0] if name.startswith("draw") else name for name in one.inputs)


def _bound_to(found: tuple[CertificateFigures, ...]) -> str:
    """Every bound value once; where certificates differ, which one has which."""
    rows = []
    for name in found[0].identity:
        values: dict[str, list[str]] = {}
        for one in found:
            values.setdefault(str(one.identity.get(name, "not stated")), []).append(one.sha256)
        shown = [(_value(name, value), of) for value, of in values.items()]
        words = [text if len(shown) == 1 else f"{text} ({', '.join(map(hash10, of))})" for text, of in shown]
        rows.append([WORDS.get(name, cell(name[0].upper() + name[1:])), "; ".join(words)])
    flags: dict[str, dict[str, None]] = {}
    for one in found:
        for flag, value in one.flags.items():
            flags.setdefault(flag, {})[value] = None
    rows += [[code(flag), cell(" or ".join(values))] for flag, values in flags.items()]
    return table(["Bound to", "Value"], rows)


def _value(name: str, value: str) -> str:
    """A bound value; of a hash its first digits and what is said about it."""
    if name not in HASHES or value == "none":
        return cell(value)
    return " ".join([hash10(value), cell(value.partition(" ")[2])]).strip()


def ledger(record: Record, stem: str) -> str:
    """Every setting: asked for, in force, from where, read when; a difference fails its case."""
    if not record.ledger:
        return ""
    rows = [
        [
            cell(row.name),
            "not set" if row.requested is None else cell(row.requested),
            f"**{cell(row.effective)}**" if row.differs else cell(row.effective),
            cell(row.source),
            cell(row.read),
            cell(", ".join(row.where)),
            cell(_remark(row)),
        ]
        for row in record.ledger
    ]
    columns = ["Setting", "Asked for", "In force", "Source", "Read", "Where", "Remark"]
    return "\n\n".join(
        [
            "## Ledger",
            "What was asked for, and what the child read back from itself. A difference fails the case.",
            table(columns, rows),
        ]
    )


def _remark(row: LedgerFigures) -> str:
    return f"differs: {row.differs}" if row.differs else row.note
