"""`harness run`: walk a spec's cases, file raw lines as they arise, and leave a record, whatever happens.

Cases run grouped by child, so that one pair is loaded at a time, or side by side on several jobs; the record lists
them in the plan's order either way.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from harness import provenance
from harness.errors import UsageError
from harness.estimate import Estimate, estimate
from harness.events import RunEvent
from harness.grown import Grower
from harness.pool import Pool, Sink, grouped
from harness.process import JOB_TIMEOUT_S, WORKER_COMMAND, stray_flags
from harness.record.lines import CaseLine, EndLine, StartLine
from harness.record.store import DEFAULT_OUT, RecordStore, read_lines
from harness.resume import Resumed, records_of
from harness.site import JobSettings, Site, local_site
from harness.spec.load import LoadedSpec
from harness.spec.plan import Case, is_timed, plan
from harness.spec.resolve import growable, missing_checkpoints, models_root

Executor = Literal["local", "ray"]
INTERRUPTED, TERMINATED = 130, 143
OnEvent = Callable[[RunEvent], None]


@dataclass(frozen=True)
class RunOptions:
    """What the command line chose. `only` holds exact case ids; empty means all."""

    only: tuple[str, ...] = ()
    device: str | None = None
    out: Path = DEFAULT_OUT
    resume: Path | None = None  # a record's page, data folder or runs.jsonl
    require: tuple[str, ...] = ()
    threads: int | None = None
    jobs: int = 1
    executor: Executor = "local"  # where the jobs are: on this host, or on a Ray cluster
    command: str | None = None  # as the record shows it; default: this process's own
    job_timeout_s: float = JOB_TIMEOUT_S
    lock_dir: Path | None = None
    gate_off: bool = False  # --no-gate: measure anyway, and say so in the record
    quiet_s: float | None = None  # how long a timed case waits for a quiet CPU; None: it does not look
    worker: tuple[str, ...] = WORKER_COMMAND


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: its cases in the plan's order, the exit code, and the record's page."""

    cases: tuple[CaseLine, ...]
    exit_code: int
    page: Path
    interrupted: bool = False
    failed: tuple[str, ...] = ()  # ids that make the exit code 1


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: end children and record as Ctrl-C does."""


def exit_code(cases: Sequence[Case], lines: Sequence[CaseLine]) -> tuple[int, tuple[str, ...]]:
    """0, 1 or 3 by the worst outcome, and the ids that failed; 1 beats 3.

    A decline that the spec declared is no failure, a known failure (`xfail`) is none, and its unexpected pass is one.
    """
    plans = {case.id: case for case in cases}
    failed: list[str] = []
    errors = False
    for line in lines:
        case = plans.get(line.case)
        declared = case is not None and case.declared_decline
        bad = line.outcome == "fail" or (line.outcome == "declined" and not declared)
        if case is not None and case.xfail is not None:
            bad = not bad and line.outcome in ("pass", "declined", "unresolved")
        if bad:
            failed.append(line.case)
        errors = errors or line.outcome == "error"
    return (1 if failed else 3 if errors else 0), tuple(failed)


def device_of(loaded: LoadedSpec, options: RunOptions) -> str:
    """Where the spec runs: as asked, else CUDA when the spec requires it, else the CPU."""
    return options.device or ("cuda" if loaded.spec.requires.cuda else "cpu")


def chosen_cases(loaded: LoadedSpec, options: RunOptions) -> tuple[Case, ...]:
    """The cases that `only` leaves, in the plan's order."""
    cases = plan(loaded)
    unknown = [name for name in options.only if name not in {case.id for case in cases}]
    if unknown:
        raise UsageError(f"no case {unknown[0]} in {loaded.id_path}")
    return tuple(case for case in cases if not options.only or case.id in options.only)


def dry_run(loaded: LoadedSpec, options: RunOptions) -> Estimate:
    """Children and seconds of a run that is not started; times of the spec's latest record where there is one."""
    cases = chosen_cases(loaded, options)
    missing, growing = _missing(loaded, options)
    if missing:
        word = "fail" if "weights" in options.require else "be skipped"
        reason = f"every case would {word}: {'; '.join(missing)}"
        return Estimate(0, 0.0, reason, {case.id: 0.0 for case in cases})
    for data in records_of(loaded, options.out):
        lines = read_lines(data / "runs.jsonl").lines
        measured = [line for line in lines if isinstance(line, CaseLine)]
        if measured:
            return estimate(cases, measured, data.name, growing=growing)
    return estimate(cases, growing=growing)


def _missing(loaded: LoadedSpec, options: RunOptions) -> tuple[tuple[str, ...], bool]:
    """Why the pair cannot be had, empty where it can; and whether it would be grown first."""
    root, real = models_root(), "weights" in options.require
    missing = missing_checkpoints(loaded.spec.pair, loaded.folder, root, real=real)
    geometry = growable(loaded.spec.pair, loaded.folder, root)
    if not missing or geometry is None or real or not device_of(loaded, options).startswith("cuda"):
        return missing, False
    obstacle = Grower().obstacle(geometry)
    return ((), True) if obstacle is None else (tuple(f"{reason}; {obstacle}" for reason in missing), False)


def run_spec(loaded: LoadedSpec, options: RunOptions, on_event: OnEvent | None = None) -> RunOutcome:
    """Run a spec into a new record, or finish one. Raises HarnessError only before the first case starts."""
    if stray := stray_flags():
        names = ", ".join(f"{name}={value}" for name, value in stray.items())
        raise UsageError(f"{names} is set in the shell and would not reach a child: unset it or put it in the spec")
    chosen = chosen_cases(loaded, options)
    with _signals(), _site(loaded, options, chosen) as site:
        if options.resume is not None:
            resumed = Resumed.open(options.resume, loaded)
            store, done = resumed.store, resumed.done
            cases = tuple(case for case in plan(loaded) if case.id in resumed.planned)
        else:
            date, device = provenance.utc_now()[:10], device_of(loaded, options)
            store, done = RecordStore.create(options.out, loaded.spec.name, device, date, loaded.text), {}
            resumed, cases = None, chosen
        notify = on_event or (lambda event: None)
        sink = Sink(store.append, notify)
        logs = [store.job_logs(number) for number in range(options.jobs)]
        try:
            with site.crew(logs, sink, store.lines) as crew:
                command = options.command or provenance.command_line()
                env = crew.environment(loaded, cases, command)
                if resumed is not None:
                    resumed.check(env)
                if resumed is None or not resumed.env:
                    store.write_env(env)
                store.append(_start_line(loaded, cases, command, resumed is not None, site.ignored))
                wanted = {case.id for case in chosen}
                todo = [case for case in cases if case.id not in done and case.id in wanted]
                Pool(crew.jobs, sink, _lost_line).run(todo)
        except KeyboardInterrupt as stop:
            code = TERMINATED if isinstance(stop, Terminated) else INTERRUPTED
            return _finish(store, cases, code)
        store.put_in_order([case.id for case in grouped(todo)])
        return _finish(store, cases, None)


def _site(loaded: LoadedSpec, options: RunOptions, cases: Sequence[Case]) -> contextlib.AbstractContextManager[Site]:
    """Where the run's jobs will be, held while it lasts."""
    settings = JobSettings(
        device=device_of(loaded, options),
        require=options.require,
        worker=options.worker if options.worker != WORKER_COMMAND else None,
        job_timeout_s=options.job_timeout_s,
        gate_off=options.gate_off,
        quiet_s=options.quiet_s,
        threads=options.threads,
    )
    timed = any(is_timed(case) for case in cases)
    if options.executor == "ray":
        from harness.ray_site import ray_site

        return ray_site(settings, loaded, options.jobs, timed=timed, lock_dir=options.lock_dir)
    return local_site(settings, cases, options.jobs, timed=timed, lock_dir=options.lock_dir)


def _lost_line(case: Case, reason: str) -> CaseLine:
    """The end of a case whose job was lost."""
    return CaseLine(case=case.id, kind=case.kind, outcome="error", reason=reason, seconds=0.0)


def _start_line(
    loaded: LoadedSpec, cases: Sequence[Case], command: str, resumed: bool, ignored: tuple[str, ...] | None
) -> StartLine:
    return StartLine(
        spec=loaded.id_path,
        spec_sha256=loaded.sha256,
        started_utc=provenance.utc_now(),
        command=command,
        resumed=resumed,
        gate_ignored=ignored,
        cases=tuple(case.id for case in cases),
        certified=True,
    )


def _finish(store: RecordStore, cases: Sequence[Case], interrupted: int | None) -> RunOutcome:
    """The end line and the page; `interrupted` is the exit code of a run that was stopped."""
    last = {line.case: line for line in store.lines if isinstance(line, CaseLine)}
    ended = tuple(last[case.id] for case in cases if case.id in last)
    code, failed = exit_code(cases, ended)
    if interrupted is not None:
        code = interrupted
    store.append(EndLine(ended_utc=provenance.utc_now(), exit_code=code, interrupted=interrupted is not None))
    return RunOutcome(ended, code, store.finish(), interrupted is not None, failed)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """While a run lasts, SIGTERM ends it the way Ctrl-C does; elsewhere than in the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
