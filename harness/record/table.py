"""Markdown tables and the one way each kind of number is written.

Cells are escaped, numbers are right-aligned, nothing is padded (padding makes noisy diffs); an absent value is a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOT_MEASURED = "not measured"


def cell(text: object) -> str:
    """Text for inside a cell: one line, pipes and angle brackets escaped so that they stay text."""
    flat = " ".join(str(text).split())
    return flat.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def code(text: object) -> str:
    """Text as code inside a cell: backticks and line breaks cannot end it early, a pipe stays escaped."""
    flat = " ".join(str(text).split()).replace("`", "'").replace("|", "\\|")
    return f"`{flat}`" if flat else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of ready-made cells; a column whose header starts with `>` is right-aligned.

    Raises ValueError for a row of another width, since a shifted figure would be read as another one.
    """
    names = [column.removeprefix(">") for column in columns]
    rule = ["---:" if column.startswith(">") else "---" for column in columns]
    lines = [_row(names), _row(rule)]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row of {len(row)} cells under {len(columns)} headers: {list(row)}")
        lines.append(_row(row))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def rate(value: float | None, absent: str = NOT_MEASURED) -> str:
    """Tokens per second, two decimals."""
    return absent if value is None else f"{value:.2f}"


def ms(value: float | None, absent: str = NOT_MEASURED) -> str:
    """Milliseconds, two decimals."""
    return absent if value is None else f"{value:.2f}"


def share(value: float | None, absent: str = NOT_MEASURED) -> str:
    """A share of one, two decimals."""
    return absent if value is None else f"{value:.2f}"


def factor(value: float | None, absent: str = NOT_MEASURED) -> str:
    """A ratio such as a speed-up, two decimals and an x."""
    return absent if value is None else f"{value:.2f}x"


def percent(value: float | None, absent: str = NOT_MEASURED) -> str:
    """A signed change in percent, one decimal; what rounds to zero carries no sign."""
    if value is None:
        return absent
    text = f"{100 * value:+.1f}%"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def percent_range(values: Sequence[float], absent: str = NOT_MEASURED) -> str:
    """`min to max` of signed changes; one value alone is written once."""
    if not values:
        return absent
    low, high = percent(min(values)), percent(max(values))
    return low if low == high else f"{low} to {high}"


def seconds(value: float | None, absent: str = NOT_MEASURED) -> str:
    """Seconds, one decimal."""
    return absent if value is None else f"{value:.1f}"


def count(value: int | None, absent: str = NOT_MEASURED) -> str:
    """A whole number with thousands separated."""
    return absent if value is None else f"{value:,}"


def plural(number: int, noun: str) -> str:
    """`1 case`, `2 cases`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
