"""Cases over several jobs, each with children of its own. What measures time runs last and alone.

One job runs everything in the serial order, in the caller's thread. With more, cases whose judgement looks at each
other (one check, one set of flags) stay on one job in their order, so every case is judged as in a serial run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from harness.errors import HarnessError
from harness.estimate import child_environments
from harness.events import RunEvent
from harness.record.lines import AnyLine, CaseLine
from harness.spec.plan import Case, child_key, is_timed

FlagKey = tuple[tuple[str, str], ...]
JOIN_S = 30.0
POLL_S = 0.2


class Job(Protocol):
    """One place with its children."""

    def run(self, case: Case) -> CaseLine:
        """Run a case to its end; its raw lines go out as they arise, its end among them."""

    def release(self, wanted: Iterable[FlagKey]) -> None:
        """End the children whose flags nobody wants any more."""

    def close(self) -> None:
        """End every child."""

    def kill(self) -> None:
        """End every child at once; may be called from another thread while `run` is busy."""


class JobLost(HarnessError):
    """A job's host or process is gone; what it was running could not be measured."""


class Stopped(BaseException):
    """Raised in a job's thread when the run is being stopped: nothing it still has to say is filed."""


class Sink:
    """Where all jobs file lines and events: one at a time, and nothing once the run is being stopped."""

    def __init__(self, emit: Callable[[AnyLine], None], notify: Callable[[RunEvent], None]) -> None:
        self._emit = emit
        self._notify = notify
        self._lock = threading.RLock()
        self._stopped = False

    def emit(self, line: AnyLine) -> None:
        """File a line; raises Stopped instead once the run is being stopped."""
        with self._lock:
            if self._stopped:
                raise Stopped
            self._emit(line)

    def notify(self, event: RunEvent) -> None:
        """Tell whoever watches; raises Stopped likewise, so that no child is started any more."""
        with self._lock:
            if self._stopped:
                raise Stopped
            self._notify(event)

    def stop(self) -> None:
        """From here on nothing is filed."""
        with self._lock:
            self._stopped = True


def flag_keys(case: Case) -> list[FlagKey]:
    """The flags of each child that a case starts."""
    return [child_key(env) for env in child_environments(case)]


def grouped(cases: Sequence[Case]) -> list[Case]:
    """Cases in the order of their children's first appearance, so that each child is started once."""
    first: dict[FlagKey, int] = {}
    for case in cases:
        first.setdefault(child_key(case.env), len(first))
    return sorted(cases, key=lambda case: first[child_key(case.env)])


def bundles(cases: Sequence[Case]) -> list[tuple[Case, ...]]:
    """Cases that stay together: those of one check with the same flags, in order."""
    found: dict[tuple[str, FlagKey], list[Case]] = {}
    for case in cases:
        found.setdefault((case.check.id, child_key(case.env)), []).append(case)
    return [tuple(bundle) for bundle in found.values()]


class Pool:
    """Runs cases on jobs. `case_lost` gives the line of a case whose job was lost while it ran."""

    def __init__(self, jobs: Sequence[Job], sink: Sink, case_lost: Callable[[Case, str], CaseLine]) -> None:
        self._jobs = list(jobs)
        self._sink = sink
        self._case_lost = case_lost
        self._lock = threading.Lock()
        self._left: list[tuple[Case, ...]] = []
        self._loaded: dict[int, set[FlagKey]] = {number: set() for number in range(len(jobs))}
        self._lost: dict[int, str] = {}
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._begun = self._ended = self._total = 0
        self._timed: list[Case] = []
        self._alone: int | None = None  # the job that runs what is timed
        self._go = threading.Event()
        self._idle = [threading.Event() for _ in jobs]
        self._closed = [threading.Event() for _ in jobs]

    def run(self, cases: Sequence[Case]) -> None:
        """Run all cases; raises what a job's thread raised, and ends every job before anything gets past this."""
        ordered = grouped(cases)
        self._total = len(ordered)
        try:
            if len(self._jobs) == 1:
                self._serially(0, ordered)
            else:
                self._side_by_side(ordered)
        except BaseException:
            self.stop()
            raise

    def _serially(self, number: int, ordered: Sequence[Case]) -> None:
        for place, case in enumerate(ordered):
            if number not in self._lost:
                self._jobs[number].release(key for later in ordered[place:] for key in flag_keys(later))
            self._one(number, case)

    def _side_by_side(self, ordered: Sequence[Case]) -> None:
        """A thread per job. Each lives to the end: the kernel ends a child with the thread that started it."""
        self._left = bundles([case for case in ordered if not is_timed(case)])
        self._timed = [case for case in ordered if is_timed(case)]
        numbers = range(len(self._jobs))
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"job-{number + 1}", daemon=True)
            for number in numbers
        ]
        for thread in self._threads:
            thread.start()
        for number in numbers:
            while not self._idle[number].wait(POLL_S):  # in short waits, so that Ctrl-C gets through
                pass
        if self._failure is None:
            self._alone = next((number for number in numbers if number not in self._lost), 0)
        self._go.set()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(POLL_S)
        if self._failure is not None:
            raise self._failure

    def _work(self, number: int) -> None:
        """A job's thread: bundles until none is left, then, on one job when all others have ended, what is timed."""
        try:
            while number not in self._lost and (bundle := self._next(number)) is not None:
                for case in bundle:
                    self._one(number, case)
            self._idle[number].set()
            self._go.wait()
            if self._alone == number:
                for other, closed in enumerate(self._closed):
                    if other != number:
                        closed.wait()
                self._serially(number, [*(case for bundle in self._left for case in bundle), *self._timed])
            if number not in self._lost:
                self._jobs[number].close()
        except Stopped:
            self._jobs[number].kill()
        except BaseException as error:  # a bug: the caller's thread raises it
            self._failure = self._failure or error
            self._left = []
            self._jobs[number].kill()
        finally:
            self._idle[number].set()
            self._closed[number].set()

    def _next(self, number: int) -> tuple[Case, ...] | None:
        """The next bundle for a job: one for a child that it has, else one for a child that no other job has."""
        with self._lock:
            if not self._left or self._failure is not None:
                return None
            mine = self._loaded[number]
            others = set().union(*(keys for other, keys in self._loaded.items() if other != number))
            keys = [child_key(bundle[0].env) for bundle in self._left]
            ranks = [0 if key in mine else 1 if key not in others else 2 for key in keys]
            chosen = self._left.pop(ranks.index(min(ranks)))
            wanted = {key for bundle in (chosen, *self._left) for case in bundle for key in flag_keys(case)}
            mine |= set(flag_keys(chosen[0]))
            mine &= wanted
        self._jobs[number].release(wanted)
        return chosen

    def _one(self, number: int, case: Case) -> None:
        """Run one case on a job; a lost job's cases end as errors."""
        with self._lock:
            begun, self._begun = self._begun, self._begun + 1
        self._sink.notify(RunEvent("case_start", case.claim, case.id, begun, self._total))
        try:
            if number in self._lost:
                raise JobLost(self._lost[number])
            line = self._jobs[number].run(case)
        except JobLost as error:
            self._lost[number] = str(error)
            line = self._case_lost(case, str(error))
            self._sink.emit(line)
        with self._lock:
            self._ended += 1
            ended = self._ended
        self._sink.notify(RunEvent("case_end", line.reason, case.id, ended, self._total, line))

    def stop(self) -> None:
        """Nothing more is filed; every child ends; returns when the jobs' threads have, or after a while."""
        self._sink.stop()
        with self._lock:
            self._left = []
        self._alone = None
        self._go.set()
        for job in self._jobs:
            job.kill()
        for thread in self._threads:
            thread.join(JOIN_S)
