"""`harness power`: how many repeats a schedule needs to find an effect, and how often it errs, by simulation."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.power import Noise, Schedule

MOST_RUNS = 100_000
FALSE_POSITIVES = 0.05


class _Share(click.ParamType[float]):
    """0.05 and 5% are the same share."""

    name = "share"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = value.strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = float("nan")
        if not -1 < share < 1:
            self.fail(f"'{value}' is no share between -1 and 1; write 0.05 or 5%", param, ctx)
        return share


SHARE = _Share()


@dataclass(frozen=True)
class _Measured:
    """A schedule by the name of the check that it comes from."""

    name: str
    schedule: Schedule


@click.command()
@click.argument("spec", required=False)
@click.option("--noise", type=SHARE, help="Relative standard deviation of one generation's rate, e.g. 2%.")
@click.option("--process-noise", type=SHARE, default=None, help="The same of an arm's ratio between processes.")
@click.option("--record", default=None, metavar="RECORD", help="Take the noise from the null deltas of a record.")
@click.option("--effect", type=SHARE, required=True, help="Effect to find, e.g. -5% for a slowdown.")
@click.option("--smallest-effect", type=SHARE, default=None, help="Smallest effect of interest. [default: 2%]")
@click.option("--processes", type=click.IntRange(1, 32), default=None, help="Fresh processes. [default: 1]")
@click.option("--order", type=click.Choice(["bracket", "abba"]), default=None, help="[default: bracket]")
@click.option("--null-blocks", type=click.IntRange(0, 8), default=None, help="[default: 0]")
@click.option("--power", "target", type=SHARE, default=0.8, help="Share of runs that must find it. [default: 80%]")
@click.option("--runs", type=click.IntRange(100, MOST_RUNS), default=2000, show_default=True, help="Simulated runs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per schedule.")
def power(
    spec: str | None,
    noise: float | None,
    process_noise: float | None,
    record: str | None,
    effect: float,
    smallest_effect: float | None,
    processes: int | None,
    order: str | None,
    null_blocks: int | None,
    target: float,
    runs: int,
    as_json: bool,
) -> int:
    """Propose the number of repeats that finds an effect; with SPEC, from its throughput checks' own schedules.

    The shipped verdict judges simulated runs, so its false-positive rate and its power are measured, not assumed.
    """
    from harness.power import Schedule

    if (noise is None) == (record is None):
        raise UsageError("give either --noise or --record, which takes it from a record's null deltas")
    given = _noise_of(Path(record)) if record is not None else _checked(noise or 0.0)
    if process_noise is not None:
        given = replace(given, process=_checked(process_noise).generation)
    if not 0 < target < 1:
        raise UsageError(f"--power {target:g} is no share of runs; write 0.8 or 80%")
    measured = _schedules(spec) if spec is not None else [_Measured("", Schedule(6))]
    options = {"smallest_effect": smallest_effect, "processes": processes, "order": order, "null_blocks": null_blocks}
    changed = {name: value for name, value in options.items() if value is not None}
    for one in measured:
        schedule = replace(one.schedule, **changed)  # type: ignore[arg-type]
        if not 0 < schedule.smallest_effect < abs(effect):
            what = f"the smallest effect of interest is {100 * schedule.smallest_effect:g} %"
            raise UsageError(f"--effect {100 * effect:g} %: {what}, and the rule states nothing below it")
        _report(replace(one, schedule=schedule), given, effect, target, runs, as_json)
    return 0


def _checked(noise: float) -> Noise:
    from harness.power import Noise

    if not noise > 0:
        raise UsageError(f"a noise of {100 * noise:g} % is no standard deviation; it must be positive")
    return Noise(noise)


def _noise_of(path: Path) -> Noise:
    """From a record: null deltas differ by two generations; process means by the rest of their spread."""
    from harness.power import Noise, noise_of
    from harness.record.compare_load import load_side

    arms = [arm for case in load_side(path).record.cases for arm in case.arms if arm.null]
    if not arms:
        raise UsageError(f"{path}: no null deltas in this record; give --noise")
    found = [noise_of(arm.null, arm.delta, arm.processes) for arm in arms]
    return Noise(max(one.generation for one in found), max(one.process for one in found))


def _schedules(spec: str) -> list[_Measured]:
    from harness.power import Schedule
    from harness.spec import load_specs, plan
    from harness.spec.model import Throughput

    cases = [case for loaded in load_specs([Path(spec)]) for case in plan(loaded)]
    found = []
    for case in cases:
        if isinstance(case.check, Throughput):
            c = case.check
            schedule = Schedule(c.repeats, c.processes, c.order, c.null_blocks, c.smallest_effect)
            found.append(_Measured(case.id, schedule))
    if not found:
        raise UsageError(f"{spec}: no throughput check; leave SPEC out to plan one")
    return found


def _report(one: _Measured, noise: Noise, effect: float, target: float, runs: int, as_json: bool) -> None:
    from harness import power as p
    from harness.stats import INTERVAL_PAIRS

    schedule = one.schedule
    own = None
    if one.name and schedule.pairs >= max(INTERVAL_PAIRS, schedule.processes):
        found = p.rates(schedule, noise, effect, runs=runs).found(effect)
        own = p.Proposal(schedule, found, p.rates(schedule, noise, runs=runs).decided)
    proposal = p.propose(schedule, noise, effect, target=target, runs=runs)
    if as_json:
        rows = {"own": own, "proposed": proposal}
        figures = {
            name: {"repeats": row.schedule.pairs, "power": row.power, "false_positives": row.false_positives}
            for name, row in rows.items()
            if row is not None
        }
        asked = {"check": one.name or None, "effect": effect, "noise": noise.generation, "process_noise": noise.process}
        click.echo(json.dumps({**asked, "runs": runs, **figures}))
        return
    words = f"{schedule.order}, {schedule.processes} process{'es' * (schedule.processes != 1)}"
    blocks = schedule.null_blocks
    words += f", {blocks} null block{'s' * (blocks != 1)} at each end" if blocks else ""
    spread = f" and {100 * noise.process:.1f} % a process" if noise.process else ""
    click.echo(
        f"{one.name + ': ' if one.name else ''}{words}; noise {100 * noise.generation:.1f} % a generation{spread}; "
        f"smallest effect {100 * schedule.smallest_effect:g} %; {runs} simulated runs"
    )
    if own is not None:
        click.echo(f"  as it stands, {_words(own, effect)}")
    elif one.name:
        click.echo(f"  as it stands, {schedule.pairs} repeats: fewer than {INTERVAL_PAIRS} have no interval")
    if proposal is None:
        click.echo(
            f"  no number of repeats up to {p.MOST_PAIRS} finds {100 * effect:+g} % in {100 * target:g} % of runs"
        )
        return
    click.echo(f"  proposed: {_words(proposal, effect)}")
    if max(row.false_positives for row in (own, proposal) if row is not None) > FALSE_POSITIVES:
        click.echo(
            "  too many false verdicts: repeats cannot average out what differs between processes; add processes"
        )


def _words(proposal: object, effect: float) -> str:
    from harness.power import Proposal

    assert isinstance(proposal, Proposal)
    false = f"false verdicts on equal arms {100 * proposal.false_positives:.1f} %"
    return f"{proposal.schedule.pairs} repeats: {100 * effect:+g} % found in {100 * proposal.power:.1f} %, {false}"
