"""`RunContext`: runs cases. It owns the children, decides skips, files raw lines, and turns failures into outcomes.

`harness run` and the pytest plugin both use it; neither knows how a check works. Where lines go is the caller's
choice (`emit`), so a test run never writes into a record.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.flags import FlagError, read_flags
from harness import gate
from harness.checks.base import Judgement
from harness.checks.registry import get
from harness.errors import CheckFailed, GateError, HarnessError, RunError
from harness.events import RunEvent
from harness.grown import Grower
from harness.process import JOB_TIMEOUT_S, WORKER_COMMAND, Child
from harness.protocol import AnyEvent, LogEvent, Progress, RawLine, Setup
from harness.record.lines import LINE_ADAPTER, AnyLine, CaseLine, ChildLine
from harness.spec.plan import Case, child_key
from harness.spec.resolve import growable, missing_checkpoints, models_root, pair_folders

MAX_CHILDREN = 4  # loaded at once; an arm with flags of its own needs a second one beside classic's
ChildKey = tuple[str, str, str, tuple[tuple[str, str], ...]]


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
        earlier: Sequence[AnyLine] = (),
        command: Sequence[str] = WORKER_COMMAND,
        job_timeout_s: float = JOB_TIMEOUT_S,
        max_children: int = MAX_CHILDREN,
        lock_dir: Path | None = None,
        locked: Iterable[str] = (),
        threads: int | None = None,
        grower: Grower | None = None,
    ) -> None:
        """`device` None: CUDA for a spec that requires it, else the CPU. `earlier`: the lines of a resumed record."""
        self.log_dir = log_dir
        self.device = device
        self.require = frozenset(require)
        self.lines: list[AnyLine] = list(earlier)
        self._sink = emit
        self._on_event = on_event
        self._command = tuple(command)
        self._timeout_s = job_timeout_s
        self._max_children = max_children
        self._lock_dir = lock_dir
        self._locked = set(locked)  # devices whose lock the caller holds, or a case of this run
        self._threads = threads
        self._grower = grower or Grower()
        self._not_grown: dict[str, HarnessError] = {}  # by geometry; tried once
        self._children: dict[ChildKey, Child] = {}  # in order of last use
        self._names: dict[ChildKey, str] = {}
        self._machine: dict[str, Any] | None = None
        self._case_child: Child | None = None

    # ---- running a case -----------------------------------------------------------------------------------------

    def run(self, case: Case) -> CaseLine:
        """Run one case to its end and file its line. Only an interrupt gets past this."""
        kind = get(case.kind)
        began = time.monotonic()
        first = len(self.lines)
        self._case_child = None
        judgement = self._precondition(case)
        if judgement is None:
            try:
                kind.measure(case, self)
                judgement = kind.judge(case, self.lines[first:], self.lines)
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
        if self._sink is not None:
            self._sink(line)

    def progress(self, case: Case, done: int, total: int, note: str = "") -> None:
        """Tell whoever watches."""
        self._notify(RunEvent("progress", note, case.id, done, total))

    def _note(self, text: str) -> None:
        self._notify(RunEvent("note", text))

    def _notify(self, event: RunEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def job(self, case: Case, kind: str, env: Mapping[str, str | None] | None = None, **args: Any) -> dict[str, Any]:
        """Run one job for a case in the child of its flags, `env` on top; returns the job's data."""
        child = self.child(case, {**case.env, **(env or {})})

        def receive(event: AnyEvent) -> None:
            if isinstance(event, RawLine):
                self.emit(_own_line(event, child, case.id))
            elif isinstance(event, Progress):
                self.progress(case, event.done, event.total, event.note)

        return child.run(kind, case.id, args, timeout_s=self._timeout_s, on_event=receive).data

    # ---- skips and gates ----------------------------------------------------------------------------------------

    def device_of(self, case: Case) -> str:
        """Where a case runs."""
        if self.device is not None:
            return self.device
        return "cuda" if any(part.cuda for part in case.requires) else "cpu"

    def _precondition(self, case: Case) -> Judgement | None:
        """Skipped, or failed under `--require`, or None to go on."""
        if case.skip is not None:
            return Judgement("skipped", case.skip)
        try:
            lacking = self._lacking(case)
            missing = [("weights", reason) for reason in self._absent(case, fit=not lacking)] + lacking
        except HarnessError as error:
            return Judgement("error", str(error))
        demanded = [reason for what, reason in missing if what in self.require]
        if demanded:
            names = ",".join(sorted({what for what, _ in missing if what in self.require}))
            return Judgement("fail", f"{'; '.join(demanded)} (--require {names})")
        if missing:
            return Judgement("skipped", "; ".join(reason for _, reason in missing))
        return None

    def _absent(self, case: Case, fit: bool) -> tuple[str, ...]:
        """Reasons for checkpoints that are not here; a pair that may be grown is, on a GPU that is `fit` for it."""
        root = models_root()
        reasons = missing_checkpoints(case.pair, case.folder, root, real="weights" in self.require)
        geometry, device = growable(case.pair, case.folder, root), self.device_of(case)
        if not (reasons and geometry and fit and device.startswith("cuda")) or "weights" in self.require:
            return reasons
        if obstacle := self._grower.obstacle(geometry):
            return tuple(f"{reason}; {obstacle}" for reason in reasons)
        if geometry not in self._not_grown:
            try:
                self._grower.grow(geometry, device, self.log_dir / f"grow-{geometry}.log", self._note)
                return ()
            except HarnessError as error:
                self._not_grown[geometry] = error
        raise self._not_grown[geometry]

    def provide(self, cases: Sequence[Case]) -> None:
        """Grow the pair that the cases need, where it is not here; what stands in the way is each case's outcome."""
        for case in cases[:1]:
            self._precondition(case)

    def _lacking(self, case: Case) -> list[tuple[str, str]]:
        """What the machine lacks for a case: a word for `--require`, and the reason."""
        device = self.device_of(case)
        needs_cuda = any(part.cuda for part in case.requires)
        if not needs_cuda and not device.startswith("cuda"):
            return self._lacking_memory(case, gate.memory_available_bytes())
        if not device.startswith("cuda"):
            return [("cuda", f"needs CUDA, and this run is on {device}")]
        machine = self.machine()
        if not machine["cuda"]:
            if not needs_cuda:
                raise GateError(f"device {device}: {machine['reason']}")
            return [("cuda", f"needs CUDA ({machine['reason']})")]
        gpu = machine["gpus"][0]
        lacking = self._lacking_memory(case, int(gpu["free_gib"] * 2**30))
        have = _capability(gpu["compute_capability"])
        for part in case.requires:
            if part.compute_capability and have < _capability(part.compute_capability.removeprefix(">=")):
                reason = f"needs compute capability {part.compute_capability}, {gpu['name']} has "
                lacking.append(("cuda", reason + gpu["compute_capability"]))
        return lacking

    def _lacking_memory(self, case: Case, free: int | None) -> list[tuple[str, str]]:
        needed = max((part.memory_gib or 0.0 for part in case.requires), default=0.0)
        if free is None or free >= needed * 2**30:
            return []
        return [("memory", f"needs {needed:g} GiB of free memory, {free / 2**30:.1f} GiB are free")]

    def machine(self) -> dict[str, Any]:
        """What torch sees on this machine: asked once, of a child that loads nothing."""
        if self._machine is None:
            child = Child("machine", {}, self.log_dir / "machine.log", command=self._command)
            try:
                with child:
                    child.start(Setup())
                    self._machine = child.run("machine").data
            except RunError as error:
                self._machine = {"cuda": False, "reason": str(error), "gpus": []}
        return self._machine

    def gpu(self) -> dict[str, Any] | None:
        """The first GPU as provenance, or None; what varies from run to run is left out."""
        gpus = self.machine()["gpus"]
        return {name: value for name, value in gpus[0].items() if name != "free_gib"} if gpus else None

    @contextlib.contextmanager
    def measuring(self, case: Case) -> Iterator[None]:
        """Hold the device's lock while a case is timed; free when this run holds it already."""
        device = self.device_of(case)
        if device in self._locked:
            yield
            return
        with gate.measuring_lock(device, self._lock_dir):
            self._locked.add(device)
            try:
                yield
            finally:
                self._locked.discard(device)

    # ---- children -----------------------------------------------------------------------------------------------

    def child_key(self, case: Case, env: Mapping[str, str | None]) -> ChildKey:
        """What tells children apart: device, pair and flags."""
        if case.pair is None:
            return (self.device_of(case), "", "", child_key(env))
        root = models_root()
        target, drafter = (str(folder) for folder in pair_folders(case.pair, case.folder, root))
        return (self.device_of(case), target, drafter, child_key(env))

    def child(self, case: Case, env: Mapping[str, str | None]) -> Child:
        """The running child for a case's pair and these flags, started if need be, its flags read back and compared."""
        key = self.child_key(case, env)
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
        gate.check_memory(folders, device)
        threads = self._threads or gate.default_threads(folders, device)
        name = self._name(case, env, key)
        self._notify(RunEvent("child", f"starting child {name}", case.id))
        child = Child(name, env, self.log_dir / f"{_file_name(name)}.log", command=self._command, on_event=self._hear)
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
                env_requested={flag: env[flag] for flag in sorted(env)},
                flags_effective=ready.flags_effective,
                ready_s=round(child.ready_s, 3),
                device=ready.device,
                threads=ready.threads,
                versions=ready.versions,
                target=ready.target,
                drafter=ready.drafter,
                peak_memory_bytes=ready.peak_memory_bytes,
            )
            check_flags(name, env, ready.flags_requested, ready.flags_effective)
        except BaseException:
            child.kill()
            raise
        self.emit(line)
        return child

    def _name(self, case: Case, env: Mapping[str, str | None], key: ChildKey) -> str:
        """A short name: "default" without flags, else the cell's labels, else the flags; unique in this run."""
        if key in self._names:
            return self._names[key]
        name = "default"
        if key[3]:
            axes = {axis: label for axis, label in case.cell if axis in case.check.matrix}
            env_axes = [a for a in axes if getattr(case.check.matrix[a], "env", None) is not None]
            if env_axes and child_key(case.env) == key[3]:
                name = "+".join(f"{axis}:{axes[axis]}" for axis in env_axes)
            else:
                name = "+".join(f"{flag}:{value}" for flag, value in key[3])
        taken = set(self._names.values())
        unique, number = name, 2
        while unique in taken:
            unique, number = f"{name}-{number}", number + 1
        self._names[key] = unique
        return unique

    def _hear(self, event: AnyEvent) -> None:
        if isinstance(event, LogEvent):
            self._note(event.message)

    def release(self, wanted: Iterable[ChildKey]) -> None:
        """Close the children that no further case needs."""
        keep = set(wanted)
        for key in [key for key in self._children if key not in keep]:
            self._children.pop(key).close()

    def close(self) -> None:
        """End every child."""
        self.release(())

    def kill(self) -> None:
        """End every child at once, without waiting for its job."""
        for child in self._children.values():
            child.kill()
        if self._case_child is not None:
            self._case_child.kill()
        self._children.clear()

    def __enter__(self) -> RunContext:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


def check_flags(
    child: str, env: Mapping[str, str | None], requested: Mapping[str, str | None], effective: Mapping[str, str]
) -> None:
    """Raise CheckFailed when a child runs with other flags than its cell says; its own reading decides."""
    wanted = {name: value for name, value in env.items() if value is not None}
    try:
        expected = read_flags(wanted).effective
    except FlagError as error:
        raise CheckFailed(f"child {child}: {error}") from None
    for name, value in expected.items():
        if effective.get(name) != value:
            seen = effective.get(name)
            raise CheckFailed(f"child {child}: the cell asks for {name}={value}, the child runs with {seen}")
    for name, given in requested.items():
        if given is not None and name not in wanted:
            raise CheckFailed(f"child {child}: {name}={given} reached the child, and the cell does not set it")


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


def _capability(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _relative(path: str) -> str:
    """A path relative to the working folder where possible: it ends up in messages."""
    with contextlib.suppress(ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-") or "child"
