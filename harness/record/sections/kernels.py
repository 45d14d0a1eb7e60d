"""Kernels on their own: the tables of products and attention, peers as ratios, and the lines of the first screen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from harness.record.kernel_plot import plot_name
from harness.record.model import CaseRecord, KernelFigures, Record
from harness.record.table import cell, count, percent_range, plural, share, table

NOT_STATED = "withheld"


def kernel_cases(record: Record) -> list[tuple[CaseRecord, KernelFigures]]:
    """Cases that ran a kernel, in order."""
    return [(case, case.kernel) for case in record.cases if case.kernel is not None]


def kernels(record: Record, stem: str) -> str:
    """Products, their peers, attention, and the plot."""
    found = [kernel for _, kernel in kernel_cases(record)]
    if not found:
        return ""
    products = [kernel for kernel in found if kernel.op == "qmv"]
    attention = [kernel for kernel in found if kernel.op == "attention"]
    plot = plot_name(record)
    parts = [
        "## Kernels",
        _how(found),
        _products(products),
        f"![{plot[1]}](data/{stem}/{plot[0]})" if plot else "",
        _peers(products),
        _attention(attention),
        _launches(found),
    ]
    return "\n\n".join(part for part in parts if part)


def _how(found: list[KernelFigures]) -> str:
    clocks = {kernel.clock for kernel in found if kernel.clock}
    timed = "the host's clock, launches included" if clocks == {"host"} else "replays of CUDA graphs"
    return (
        f"Times are medians per call of {timed}, calls following one another over rotated copies of the weights or "
        "caches; ours are dependent launches, as in decode, peers launch as they ship. Our products begin with "
        "activations that their producer made ready and end with partial sums that the next kernel adds up; peers' "
        "begin and end with bf16. MB and GB/s count what our kernel must read. *Of stream* is that rate over the "
        "read-only stream's of the same repeats. Errors are "
        "||out - ref|| / ||ref|| against float64: of a product before its output is rounded, of attention after. "
        "A shape with a differing byte states no figure."
    )


def _products(found: list[KernelFigures]) -> str:
    if not found:
        return ""
    ratios: Ratios = (
        ("M=8 / M=1", ".3f", lambda kernel: kernel.m8_over_m1),
        ("4 x M=1 / M=4", ".2f", lambda kernel: kernel.four_over_one),
    )
    return "### Products\n\n" + _figures(("Matrix", "K x N"), ratios, found)


def _attention(found: list[KernelFigures]) -> str:
    if not found:
        return ""
    ratios: Ratios = (
        ("M=4 / M=1", ".3f", lambda kernel: kernel.m4_over_m1),
        ("M=8 / M=1", ".3f", lambda kernel: kernel.m8_over_m1),
    )
    return "### Attention\n\n" + _figures(("Layer", "Shape"), ratios, found)


Ratios = tuple[tuple[str, str, Callable[[KernelFigures], float | None]], ...]
"""Columns of a table: heading, format, value."""


def _figures(names: tuple[str, str], ratios: Ratios, found: list[KernelFigures]) -> str:
    """A line for each shape: times, rates, these ratios, error, bytes, null range."""
    columns = [*names, ">MB", *_time_columns(found), ">GB/s", ">Of stream", *(f">{name}" for name, _, _ in ratios)]
    columns += [">Error", ">Differing bytes", ">Null"]
    rows = [
        [
            cell(kernel.name),
            cell(kernel.shape),
            f"{kernel.nbytes / 1e6:.1f}",
            *_times(kernel, found),
            *_rates(kernel),
            *(_value(kernel, value(kernel), form) for _, form, value in ratios),
            _value(kernel, kernel.rel_error, ".1e"),
            _bytes(kernel),
            percent_range(kernel.null_range or ()),
        ]
        for kernel in found
    ]
    return table(columns, rows)


def _peers(found: list[KernelFigures]) -> str:
    """Our time over each peer's, and below it who they were and who is missing why."""
    names = list(dict.fromkeys(peer.peer for kernel in found for peer in kernel.peers))
    if not names:
        return ""
    rows_of = {
        name: sorted({int(m) for kernel in found for peer in kernel.peers if peer.peer == name for m in peer.ratio})
        for name in names
    }
    shown = [name for name in names if rows_of[name]]
    parts = ["### Peers"]
    if shown:
        columns = ["Matrix", "K x N"]
        columns += [f">{cell(name)} M={m}" for name in shown for m in rows_of[name]]
        rows = []
        for kernel in found:
            by_name = {peer.peer: peer for peer in kernel.peers}
            cells = []
            for name in shown:
                for m in rows_of[name]:
                    peer = by_name.get(name)
                    absent = "not asked" if peer is None else "not measured"
                    cells.append(share(peer.ratio.get(str(m)) if peer else None, absent))
            rows.append([cell(kernel.name), cell(kernel.shape), *cells])
        parts += ["Our time over the peer's; below 1 ours is faster.", table(columns, rows)]
    parts.append("\n".join(_peer_lines(found, names)))
    return "\n\n".join(parts)


def _peer_lines(found: list[KernelFigures], names: Iterable[str]) -> list[str]:
    lines = []
    for name in names:
        mine = [peer for kernel in found for peer in kernel.peers if peer.peer == name]
        ran = [peer for peer in mine if peer.ratio]
        words = [f"measured at {plural(len(ran), 'shape')}"] if ran else []
        words += [cell(peer.version) for peer in ran[:1] if peer.version]
        words += [cell(peer.note) for peer in ran[:1] if peer.note]
        errors = [peer.rel_error for peer in ran if peer.rel_error is not None]
        words += [f"error of its rounded output at most {max(errors):.1e}"] if errors else []
        reasons: dict[str, int] = {}
        for peer in mine:
            if peer.reason:
                reasons[peer.reason] = reasons.get(peer.reason, 0) + 1
        words += [f"not measured at {plural(number, 'shape')}: {cell(reason)}" for reason, number in reasons.items()]
        lines.append(f"- **{cell(name)}**: {'; '.join(words) or 'withheld with our own figures'}.")
    return lines


def _launches(found: list[KernelFigures]) -> str:
    """Our launch constants of each shape, folded."""
    rows = [[cell(kernel.name), cell(kernel.shape), cell(kernel.config), str(kernel.copies)] for kernel in found]
    inner = table(["What", "Shape", "Launch", ">Copies rotated"], rows)
    return f"<details>\n<summary>Launch constants</summary>\n\n{inner}\n\n</details>"


def _time_columns(found: list[KernelFigures]) -> list[str]:
    return [f">M={m} us" for m in _rows(found)]


def _rows(found: list[KernelFigures]) -> list[str]:
    return sorted({m for kernel in found for m in kernel.us}, key=int)


def _times(kernel: KernelFigures, found: list[KernelFigures]) -> list[str]:
    return [_value(kernel, kernel.us.get(m), ".2f") for m in _rows(found)]


def _rates(kernel: KernelFigures) -> list[str]:
    first = next(iter(kernel.gb_per_s.values()), None)
    return [_value(kernel, first, ".0f"), _value(kernel, kernel.stream_share, ".2f")]


def _range(values: Sequence[float], form: str) -> str:
    """Smallest to largest; one value alone when they look the same."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _value(kernel: KernelFigures, value: float | None, form: str) -> str:
    if kernel.withheld:
        return NOT_STATED
    return "not measured" if value is None else format(value, form)


def _bytes(kernel: KernelFigures) -> str:
    if not kernel.compared:
        return "not compared"
    return "0" if not kernel.differing_bytes else f"**{count(kernel.differing_bytes)}**"


# ---- the first screen -----------------------------------------------------------------------------------------------


def summary_lines(record: Record) -> list[tuple[str, str]]:
    """What stands on the first screen of a record of kernels."""
    found = [kernel for _, kernel in kernel_cases(record)]
    return [
        ("Differing bytes", _differing(record, found)),
        ("Answer", _answer(found)),
        ("Ceiling", _ceiling(found)),
        ("Noise", _noise(found)),
        ("Peers", _peer_answer(found)),
    ]


def _differing(record: Record, found: list[KernelFigures]) -> str:
    others = [check for case in record.of_kind("row_identity") for check in case.checks]
    total = sum(kernel.differing_bytes for kernel in found) + sum(check.differing_bytes or 0 for check in others)
    statements = sum(kernel.compared for kernel in found) + len(others)
    where = f"{plural(statements, 'statement')} about rows: M = 1 to 8, other slots, NaN beside, repeats, graphs"
    return f"**{count(total)}** over {where}."


def _answer(found: list[KernelFigures]) -> str:
    words = []
    for op, name in (("qmv", "products"), ("attention", "attention")):
        mine = [kernel for kernel in found if kernel.op == op and not kernel.withheld]
        shares = [kernel.stream_share for kernel in mine if kernel.stream_share is not None]
        eights = [kernel.m8_over_m1 for kernel in mine if kernel.m8_over_m1 is not None]
        errors = [kernel.rel_error for kernel in mine if kernel.rel_error is not None]
        if not mine:
            continue
        parts = [f"{name} at {plural(len(mine), 'shape')}"]
        parts += [f"{_range(shares, '.2f')} of the stream at M = 1"] if shares else []
        parts += [f"M = 8 over M = 1 at most {max(eights):.3f}"] if eights else []
        parts += [f"error at most {max(errors):.1e}"] if errors else []
        words.append(", ".join(parts))
    return "; ".join(words) + "." if words else ""


def _ceiling(found: list[KernelFigures]) -> str:
    rates = sorted(kernel.stream_gb_per_s for kernel in found if kernel.stream_gb_per_s is not None)
    if not rates:
        return ""
    return f"read-only stream {_range(rates, '.0f')} GB/s over {plural(len(rates), 'case')}."


def _noise(found: list[KernelFigures]) -> str:
    nulls = [value for kernel in found for value in kernel.null_range or ()]
    spreads = [kernel.null_spread for kernel in found if kernel.null_spread is not None]
    if not nulls:
        return ""
    return (
        f"ours against itself in the same repeats (null arm) {percent_range(nulls)}; two medians of one arm may lie "
        f"up to {100 * max(spreads):.2f} % apart."
    )


def _peer_answer(found: list[KernelFigures]) -> str:
    words = []
    for name in dict.fromkeys(peer.peer for kernel in found for peer in kernel.peers):
        mine = [peer for kernel in found for peer in kernel.peers if peer.peer == name]
        ratios = [ratio for peer in mine for ratio in peer.ratio.values()]
        if ratios:
            words.append(f"{cell(name)} {_range(ratios, '.2f')}")
        else:
            reason = next((peer.reason for peer in mine if peer.reason), NOT_STATED)
            words.append(f"{cell(name)} not measured ({cell(reason)})")
    return f"our time over theirs: {'; '.join(words)}." if words else ""
