"""`harness run`: measure a spec into a record, with progress, and a clean end whatever happens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.common import DEVICE, select
from harness.errors import UsageError
from harness.require import REQUIREMENTS, required
from harness.spec import LoadedSpec, load_spec, plan

QUIET_WAIT_S = 15.0

if TYPE_CHECKING:
    from harness.record.lines import CaseLine
    from harness.run import RunOptions


@click.command()
@click.argument("spec")
@click.option("--only", multiple=True, metavar="ID", help="Only cases whose id is or contains ID (repeatable).")
@click.option("--dry-run", is_flag=True, help="Run nothing: print cases, child processes and the time to expect.")
@click.option("--device", type=DEVICE, default=None, help="cpu, cuda or cuda:N. [default: what the spec requires]")
@click.option("--out", default=None, help="Folder for the record. [default: docs/benchmark_results]")
@click.option("--resume", is_flag=True, help="Finish the latest unfinished record of this spec.")
@click.option("--record", default=None, help="With --resume: the record to finish (its page or data folder).")
@click.option("--require", multiple=True, metavar="WHAT", help=f"Fail without it: {', '.join(REQUIREMENTS)}.")
@click.option("--threads", type=click.IntRange(1), default=None, help="CPU threads of the child processes.")
@click.option("--jobs", type=click.IntRange(1), default=1, help="Cases side by side, on all GPUs or sharing the CPU.")
@click.option(
    "--executor", type=click.Choice(["local", "ray"]), default="local", help="Where jobs run. [default: here]"
)
@click.option("--no-gate", is_flag=True, help="Measure on a machine that is in use or too small; the record says so.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per case, then one for the run.")
@click.option("--plain", is_flag=True, help="Lines instead of progress bars (as when the output is not a terminal).")
@click.option("--quiet", "-q", is_flag=True, help="Only what failed, and where the record is.")
def run(
    spec: str,
    only: tuple[str, ...],
    dry_run: bool,
    device: str | None,
    out: str | None,
    resume: bool,
    record: str | None,
    require: tuple[str, ...],
    threads: int | None,
    jobs: int,
    executor: str,
    no_gate: bool,
    as_json: bool,
    plain: bool,
    quiet: bool,
) -> int:
    """Run SPEC's cases and write its record; exit 0 if none failed, 1 if one did, 3 if one could not be measured."""
    from harness.cli.progress import watcher
    from harness.record.store import DEFAULT_OUT
    from harness.resume import find_unfinished
    from harness.run import RunOptions, run_spec

    if record is not None and not resume:
        raise UsageError("--record names what --resume finishes; give both, or neither")
    if device is not None and ":" in device and executor == "ray":
        raise UsageError(f"--device {device} is one GPU of this host; with --executor ray give --device cuda")
    loaded = load_spec(spec)
    folder = Path(out) if out is not None else DEFAULT_OUT
    chosen = tuple(case.id for case in select(plan(loaded), only)) if only else ()
    unfinished = (Path(record) if record is not None else find_unfinished(loaded, folder)) if resume else None
    options = RunOptions(
        only=chosen,
        device=device,
        out=folder,
        resume=unfinished,
        require=required(require),
        threads=threads,
        jobs=jobs,
        executor="ray" if executor == "ray" else "local",
        gate_off=no_gate,
        quiet_s=QUIET_WAIT_S,
    )
    if dry_run:
        return _dry_run(loaded, options, as_json)
    with watcher(as_json=as_json, plain=plain, quiet=quiet) as watch:
        outcome = run_spec(loaded, options, watch.see)
    counts = {word: sum(line.outcome == word for line in outcome.cases) for word in _words(outcome.cases)}
    if as_json:
        end = {"exit_code": outcome.exit_code, "page": outcome.page.as_posix(), "counts": counts}
        end |= {"failed": list(outcome.failed), "interrupted": outcome.interrupted}
        click.echo(json.dumps(end, ensure_ascii=False))
        return outcome.exit_code
    if not quiet:
        said = ", ".join(f"{number} {word}" for word, number in counts.items())
        click.echo(f"{len(outcome.cases)} cases: {said or 'none ended'}")
    for name in outcome.failed:
        click.echo(f"failed: {name}", err=True)
    click.echo(f"record: {outcome.page.as_posix()}")
    if outcome.interrupted:
        click.echo(f"interrupted; what was measured is kept, finish it with `harness run {spec} --resume`", err=True)
    return outcome.exit_code


def _words(lines: Sequence[CaseLine]) -> list[str]:
    """Outcomes that occur, in a fixed order."""
    order = ("pass", "declined", "unresolved", "skipped", "fail", "error")
    seen = {line.outcome for line in lines}
    return [word for word in order if word in seen]


def _dry_run(loaded: LoadedSpec, options: RunOptions, as_json: bool) -> int:
    from harness.run import dry_run

    plan_ = dry_run(loaded, options)
    if as_json:
        data = {"cases": dict(plan_.cases), "children": plan_.children, "seconds": plan_.seconds, "basis": plan_.basis}
        click.echo(json.dumps(data, ensure_ascii=False))
        return 0
    for name, seconds in plan_.cases.items():
        click.echo(f"  {name}  about {seconds:.0f} s")
    processes = f"{plan_.children} child process{'es' * (plan_.children != 1)}"
    click.echo(f"{len(plan_.cases)} cases in {processes}, about {duration(plan_.seconds)} (basis: {plan_.basis})")
    return 0


def duration(seconds: float) -> str:
    """`40 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
