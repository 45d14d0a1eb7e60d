"""Timed lines -> whether one arm drafted the same way each time. Pure.

Drafting is as deterministic as the text: one prompt at one block size gives one sequence of rounds, in every process.
A run that differs has equal text, since the target decides that, so nothing but the counters can show it.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.record.lines import ArmLine

Rounds = tuple[tuple[int, ...], tuple[int, ...]]


def unsteady_counters(lines: Iterable[ArmLine]) -> str | None:
    """The first arm and prompt whose runs accepted or offered other drafts than most of them did, or None."""
    runs: dict[tuple[str, str, int], list[ArmLine]] = {}
    for line in lines:
        runs.setdefault((line.prompt, line.arm, line.block_size), []).append(line)
    for (prompt, arm, _), found in runs.items():
        kinds: dict[Rounds, list[ArmLine]] = {}
        for line in found:
            kinds.setdefault((line.accepted_per_round, line.drafted_per_round), []).append(line)
        if len(kinds) > 1:
            most, *rest = sorted(kinds.values(), key=len, reverse=True)
            few = [line for kind in rest for line in kind]
            places = ", ".join(dict.fromkeys(_place(line) for line in few))
            return (
                f"prompt {prompt}: {arm} does not draft alike each time: {_counts(most[0])} in {len(most)} of "
                f"{len(found)} runs, {_counts(few[0])} in {places}"
            )
    return None


def _counts(line: ArmLine) -> str:
    return f"{sum(line.accepted_per_round)} of {sum(line.drafted_per_round)} drafts accepted"


def _place(line: ArmLine) -> str:
    repeat = f"repeat {line.repeat + 1}"
    return repeat if line.process is None else f"{repeat} (process {line.process + 1})"
