"""`RunContext`: runs cases. It owns the children, decides skips, files raw lines, and turns failures into outcomes.

`harness run` and the pytest plugin both use it; neither knows how a check works. Where lines go is the caller's
choice (`emit`), so a test run never writes into a record.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness import gate, gpus, ledger
from harness.checks.base import Judgement
from harness.checks.registry import get
from harness.children import ChildKey, file_name, key_of, name_child
from harness.errors import CheckFailed, GateError, HarnessError, RunError
from harness.events import RunEvent
from harness.grown import Grower
from harness.ledger import check_flags
from harness.locks import Place, measuring_lock, places
from harness.meter import Meter
from harness.needs import Needs
from harness.peak import peak_problem
from harness.process import JOB_TIMEOUT_S, WORKER_COMMAND, Child
from harness.protocol import AnyEvent, LogEvent, Progress, RawLine, Setup
from harness.record.lines import LINE_ADAPTER, AnyLine, CaseLine, ChildLine, GateLine, PathLine
from harness.record.telemetry import Telemetry
from harness.spec.plan import Case

QUIET_FOR_S = 60.0
MAX_CHILDREN = 4  # loaded at once; an arm with flags of its own needs a second one beside classic's


class RunContext:
    """Children and lines of one run. Close it, or use it as a context manager."""

    def __init__(
        self,
        *,
        log_dir: Path,
        device: str | None = None,
        require: Iterable[str] = (),
        emit: Callable[[AnyLine], None] | None = None,
        on_event: Callable[[RunEvent], None] | None = None,
        lines: list[AnyLine] | None = None,
        names: dict[ChildKey, str] | None = None,
        command: Sequence[str] = WORKER_COMMAND,
        job_timeout_s: float = JOB_TIMEOUT_S,
        max_children: int = MAX_CHILDREN,
        lock_dir: Path | None = None,
        lock_wait_s: float = 0.0,
        place: Place | None = None,
        gate_off: bool = False,
        quiet_s: float | None = None,
        threads: int | None = None,
        grower: Grower | None = None,
    ) -> None:
        """`device` None: CUDA for a spec that requires it, else the CPU. `lines`: the run's lines so far, to which this
        context adds; jobs of one run share them. `names`: what its children are called.

        `place`: where the caller lets it run, whose lock the caller holds. `gate_off`: too little memory is noted, not
        refused. `quiet_s`: how long timed cases wait for a quiet CPU, all together; None: they do not look.
        """
        self.log_dir = log_dir
        self.device = device
        self.place = place
        self.require = frozenset(require)
        self.lines: list[AnyLine] = [] if lines is None else lines
        self._own: list[AnyLine] = []  # of the running case
        self._case_id: str | None = None
        self._sink = emit
        self._on_event = on_event
        self._command = tuple(command)
        self._timeout_s = job_timeout_s
        self._max_children = max_children
        self._lock_dir = lock_dir
        self._lock_wait_s = lock_wait_s
        self._gate_off = gate_off
        self._quiet_s = quiet_s
        self._quiet_until = 0.0
        self._threads = threads
        self._pinned = {gpus.VISIBLE: place.pin} if place is not None and place.pin is not None else {}
        self._needs = Needs(
            device=device,
            require=self.require,
            log_dir=log_dir,
            command=self._command,
            pinned=self._pinned,
            grower=grower or Grower(),
            note=self._note,
        )
        self._meter: Meter | None = None
        self._children: dict[ChildKey, Child] = {}  # in order of last use
        self._names: dict[ChildKey, str] = {} if names is None else names
        self._case_child: Child | None = None
        self._aside: Child | None = None  # the last child that ran a job of its own
        self._case_keys: set[ChildKey] = set()

    # ---- running a case -----------------------------------------------------------------------------------------

    def run(self, case: Case) -> CaseLine:
        """Run one case to its end and file its line. Only an interrupt gets past this."""
        kind = get(case.kind)
        began = time.monotonic()
        self._own = []
        self._case_id = case.id
        self._case_child = None
        self._case_keys.clear()
        judgement = self._needs.judgement(case)
        if judgement is None:
            try:
                kind.measure(case, self)
                judgement = kind.judge(case, self._own, self.lines)
            except CheckFailed as error:
                judgement = Judgement("fail", str(error))
            except (HarnessError, ValueError) as error:
                judgement = Judgement("error", " ".join(str(error).split()))
        child = self._case_child
        line = CaseLine(
            case=case.id,
            kind=case.kind,
            outcome=judgement.outcome,
            reason=judgement.reason,
            verdict=judgement.verdict,
            child=child.name if child is not None else None,
            seconds=round(time.monotonic() - began, 3),
            log=child.log_path.name if child is not None else None,
        )
        self.emit(line)
        return line

    def emit(self, line: AnyLine) -> None:
        """File a raw line."""
        self.lines.append(line)
        self._own.append(line)
        if self._sink is not None:
            self._sink(line)

    def progress(self, case: Case, done: int, total: int, note: str = "") -> None:
        """Tell whoever watches."""
        self._notify(RunEvent("progress", note, case.id, done, total))

    def _note(self, text: str) -> None:
        self._notify(RunEvent("note", text, self._case_id))

    def _notify(self, event: RunEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def job(self, case: Case, kind: str, env: Mapping[str, str | None] | None = None, **args: Any) -> dict[str, Any]:
        """Run one job for a case in the child of its flags, `env` on top; returns the job's data."""
        return self._ask(self.child(case, {**case.env, **(env or {})}), case, kind, args)

    def aside(self, case: Case, name: str, kind: str, **args: Any) -> dict[str, Any]:
        """Run one job in a child of its own, which loads no pair, gets no flags and ends with the job."""
        log = self.log_dir / f"{file_name(name)}.log"
        self._note(f"starting {name}")
        with Child(name, {}, log, command=self._command, on_event=self._hear, pinned=self._pinned) as child:
            self._aside = child
            child.start(Setup(device=self.device_of(case), threads=self._threads))
            return self._ask(child, case, kind, args)

    def _ask(self, child: Child, case: Case, kind: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """Run one job in a child; what it sends on the way is filed. CheckFailed when it ran other than asked."""
        found: list[str] = []

        def receive(event: AnyEvent) -> None:
            if isinstance(event, RawLine):
                line = _own_line(event, child, case.id)
                self.emit(line)
                if isinstance(line, PathLine) and (differs := ledger.path_difference(line, args)):
                    found.append(differs)
            elif isinstance(event, Progress):
                self.progress(case, event.done, event.total, event.note)

        result = child.run(kind, case.id, args, timeout_s=self._timeout_s, on_event=receive)
        allowed = case.check.max_peak_gib if child is not self._aside else None  # another engine's memory is its own
        if problem := peak_problem(result.peak_memory_bytes, allowed, self.device_of(case)):
            found.append(problem)
        if found:
            raise CheckFailed(f"child {child.name}: {found[0]}")
        return result.data

    # ---- skips and gates ----------------------------------------------------------------------------------------

    def device_of(self, case: Case) -> str:
        """Where a case runs."""
        return self._needs.device_of(case)

    def provide(self, cases: Sequence[Case]) -> None:
        """Grow the pair that the cases need, where it is not here; what stands in the way is each case's outcome."""
        for case in cases[:1]:
            self._needs.judgement(case)

    def gpu(self) -> dict[str, Any] | None:
        """The run's GPU as provenance, or None; what varies from run to run is left out."""
        device = self.device or "cuda"
        try:
            seen = self._needs.gpu_of(device)
        except GateError:
            return None
        known = gpus.facts(self.place.gpu) if self.place is not None and self.place.gpu is not None else {}
        return {name: value for name, value in seen.items() if name != "free_gib"} | known

    @contextlib.contextmanager
    def measuring(self, case: Case) -> Iterator[None]:
        """Hold the device's lock while a case is timed, unless the run does already, on a CPU that is quiet.

        The state before and after is filed. Raises GateError for a busy CPU under `--require quiet`.
        """
        device = self.device_of(case)
        with contextlib.ExitStack() as stack:
            if self.place is None:
                place = self._place_of(device)
                stack.enter_context(measuring_lock(place, self._lock_dir, self._lock_wait_s))
            quiet = self._wait_until_quiet()
            if quiet.note:
                if "quiet" in self.require:
                    raise GateError(f"{quiet.note}, also after {quiet.waited_s:g} s (--require quiet)")
                self._note(f"{quiet.note}: the figures of {case.name} may have been touched")
            state = self.telemetry(case)
            self.emit(GateLine(case=case.id, when="before", waited_s=quiet.waited_s, note=quiet.note, telemetry=state))
            yield
            self.emit(GateLine(case=case.id, when="after", telemetry=self.telemetry(case)))

    def _wait_until_quiet(self) -> gate.Quiet:
        """Wait as long as this run may in all; a CPU that was quiet a minute ago is not asked again."""
        asked = self._quiet_s is not None or "quiet" in self.require
        if not asked or time.monotonic() < self._quiet_until:
            return gate.Quiet(0.0, "")
        quiet = gate.wait_until_quiet(self._quiet_s or 0.0)
        self._quiet_s = max((self._quiet_s or 0.0) - quiet.waited_s, 0.0)
        self._quiet_until = 0.0 if quiet.note else time.monotonic() + QUIET_FOR_S
        return quiet

    def telemetry(self, case: Case) -> Telemetry:
        """The machine's state now, with the GPU that the case runs on."""
        if self._meter is None:
            self._meter = Meter(self._place_of(self.device_of(case)).gpu)
        return self._meter.read(child.pid for child in self._children.values() if child.alive)

    def _place_of(self, device: str) -> Place:
        """The run's place, else the first that the device word means: children without a pin take that one."""
        return self.place if self.place is not None else places(device)[0]

    # ---- children -----------------------------------------------------------------------------------------------

    def child_key(self, case: Case, env: Mapping[str, str | None]) -> ChildKey:
        """What tells children apart: device, pair and flags."""
        return key_of(self.device_of(case), case, env)

    def child(self, case: Case, env: Mapping[str, str | None]) -> Child:
        """The running child for a case's pair and these flags, started if need be, its flags read back and compared."""
        key = self.child_key(case, env)
        self._case_keys.add(key)
        found = self._children.pop(key, None)
        if found is not None and not found.alive:
            found.kill()
            found = None
        if found is None:
            found = self._start(case, env, key)
        self._children[key] = found
        if self._case_child is None:
            self._case_child = found
        return found

    def _start(self, case: Case, env: Mapping[str, str | None], key: ChildKey) -> Child:
        while len(self._children) >= self._max_children:
            self._children.pop(next(iter(self._children))).close()
        device, target, drafter, _ = key
        folders = tuple(Path(folder) for folder in (target, drafter) if folder)  # none: the child loads no pair
        self._check_memory(case, folders, device)
        threads = self._threads or gate.default_threads(folders, device)
        needs_cuda = any(part.cuda for part in case.requires)
        sources = ledger.sources(device, needs_cuda, self._threads, threads, os.environ)
        name = name_child(self._names, case, env, key)
        self._notify(RunEvent("child", f"starting child {name}", case.id))
        log = self.log_dir / f"{file_name(name)}.log"
        child = Child(name, env, log, command=self._command, on_event=self._hear, pinned=self._pinned)
        self._case_child = self._case_child or child
        try:
            setup = Setup(
                target=_relative(target) if target else None,
                drafter=_relative(drafter) if drafter else None,
                kind=case.pair.kind if case.pair is not None else None,
                device=device,
                threads=threads,
            )
            ready = child.start(setup)
            line = ChildLine(
                child=name,
                started_for=case.id,
                env_requested=dict(key[3]),  # a flag that a cell leaves unset is asked for by nobody
                flags_effective=ready.flags_effective,
                ready_s=round(child.ready_s, 3),
                device=ready.device,
                threads=ready.threads,
                versions=ready.versions,
                target=ready.target,
                drafter=ready.drafter,
                peak_memory_bytes=ready.peak_memory_bytes,
                load_phases=ready.load_phases,
                settings=ledger.annotate(ready.settings, env, os.environ, sources),
            )
            check_flags(name, env, ready.flags_requested, ready.flags_effective)
            if differs := ledger.first_difference(line.settings):
                raise CheckFailed(f"child {name}: {differs}")
        except BaseException:
            child.kill()
            raise
        self._file_or_kill(line, child)
        return child

    def _file_or_kill(self, line: AnyLine, child: Child) -> None:
        """File a child's line; a run that is being stopped takes none, and then the child must not stay."""
        try:
            self.emit(line)
        except BaseException:
            child.kill()
            raise

    def _check_memory(self, case: Case, folders: tuple[Path, ...], device: str) -> None:
        """Make room by ending children that this case does not use; GateError where that is not enough."""
        while True:
            reason = gate.memory_problem(folders, device, gate.memory_available_bytes(), self._gpu_free(device))
            idle = next((key for key in self._children if key not in self._case_keys), None)
            if reason is None or idle is None:
                break
            self._children.pop(idle).close()
        if reason is None:
            return
        if not self._gate_off:
            raise GateError(reason)
        self._note(f"--no-gate: {reason}")
        self.emit(GateLine(case=case.id, when="load", ignored=(reason,)))

    def _gpu_free(self, device: str) -> int | None:
        """Free bytes of the case's GPU: the driver's word, else torch's from the start of the run, else None."""
        if not device.startswith("cuda"):
            return None
        gpu = self._place_of(device).gpu
        state = gpus.state(gpu) if gpu is not None else None
        if state is not None:
            return state.free_bytes
        return None if self._children else int(self._needs.gpu_of(device)["free_gib"] * 2**30)

    def _hear(self, event: AnyEvent) -> None:
        if isinstance(event, LogEvent):
            self._note(event.message)

    def renew(self, case: Case, environments: Iterable[Mapping[str, str | None]]) -> None:
        """Close the children of these flags, so that the case's next job of each starts a fresh process."""
        for key in {self.child_key(case, {**case.env, **env}) for env in environments}:
            if (child := self._children.pop(key, None)) is not None:
                child.close()

    def release(self, wanted: Iterable[ChildKey]) -> None:
        """Close the children that no further case needs."""
        keep = set(wanted)
        for key in [key for key in self._children if key not in keep]:
            self._children.pop(key).close()

    def release_flags(self, wanted: Iterable[tuple[tuple[str, str], ...]]) -> None:
        """Close the children whose flags are not wanted."""
        keep = set(wanted)
        self.release([key for key in self._children if key[3] in keep])

    def close(self) -> None:
        """End every child."""
        self.release(())
        if self._meter is not None:
            self._meter.close()
            self._meter = None

    def kill(self) -> None:
        """End every child at once, without waiting for its job."""
        for child in list(self._children.values()):  # another thread may be adding one
            child.kill()
        for last in (self._case_child, self._aside):
            if last is not None:
                last.kill()
        self._children.clear()

    def __enter__(self) -> RunContext:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


def _own_line(event: RawLine, child: Child, case_id: str) -> AnyLine:
    """The raw line of an event; a child that sends anything but lines of its case is ended."""
    try:
        line = LINE_ADAPTER.validate_python(event.line)
    except ValidationError as error:
        child.kill()
        problem = error.errors(include_url=False)[0]
        raise RunError(f"child {child.name} sent a malformed raw line: {problem['loc']} {problem['msg']}") from None
    if getattr(line, "case", None) != case_id:
        child.kill()
        raise RunError(f"child {child.name} sent a line of another case than {case_id}")
    return line


def _relative(path: str) -> str:
    """A path relative to the working folder where possible: it ends up in messages."""
    with contextlib.suppress(ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return path
