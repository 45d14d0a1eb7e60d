"""Where the jobs of a run are: on this host, a place and a context of children for each."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness import gate, gpus, provenance
from harness.admission import Admitted, admit
from harness.children import ChildKey, name_children
from harness.context import RunContext
from harness.errors import GateError
from harness.locks import Place
from harness.pool import FlagKey, Job, Sink, grouped
from harness.process import WORKER_COMMAND
from harness.record.lines import AnyLine, CaseLine
from harness.spec.load import LoadedSpec
from harness.spec.plan import Case
from harness.spec.resolve import models_root, pair_folders

Environment = dict[str, Any]


@dataclass(frozen=True)
class JobSettings:
    """What every job of a run gets alike."""

    device: str
    require: tuple[str, ...]
    worker: tuple[str, ...] | None  # None: the worker of this project
    job_timeout_s: float
    gate_off: bool
    quiet_s: float | None
    threads: int | None


@dataclass
class Crew:
    """The jobs of a run, and what is asked of their hosts before the first case."""

    jobs: Sequence[Job]
    environment: Callable[[LoadedSpec, Sequence[Case], str], Environment]


class Site(Protocol):
    """Places that a run holds. `ignored`: what the gate would have refused, where it is off."""

    @property
    def ignored(self) -> tuple[str, ...] | None:
        """None where the gate is on."""

    def crew(
        self, logs: Sequence[Path], sink: Sink, earlier: Sequence[AnyLine]
    ) -> contextlib.AbstractContextManager[Crew]:
        """The jobs, ended when the context is left; `logs` names a folder for each."""


class LocalJob:
    """A job on this host."""

    def __init__(self, context: RunContext) -> None:
        self.context = context

    def run(self, case: Case) -> CaseLine:
        """Run a case."""
        return self.context.run(case)

    def release(self, wanted: Iterable[FlagKey]) -> None:
        """End children by their flags."""
        self.context.release_flags(wanted)

    def close(self) -> None:
        """End every child."""
        self.context.close()

    def kill(self) -> None:
        """End every child at once."""
        self.context.kill()


@dataclass(frozen=True)
class LocalSite:
    """Held places of this host."""

    admitted: Admitted
    settings: JobSettings

    @property
    def ignored(self) -> tuple[str, ...] | None:
        """What the gate would have refused."""
        return self.admitted.ignored

    @contextlib.contextmanager
    def crew(self, logs: Sequence[Path], sink: Sink, earlier: Sequence[AnyLine]) -> Iterator[Crew]:
        """A context per place; they see one list of lines and call their children by the same names."""
        lines = list(earlier)
        names: dict[ChildKey, str] = {}
        with contextlib.ExitStack() as stack:
            contexts = [
                stack.enter_context(
                    RunContext(
                        log_dir=folder,
                        device=self.settings.device,
                        place=place,
                        require=self.settings.require,
                        emit=sink.emit,
                        on_event=sink.notify,
                        lines=lines,
                        names=names,
                        command=self.settings.worker or WORKER_COMMAND,
                        job_timeout_s=self.settings.job_timeout_s,
                        gate_off=self.settings.gate_off,
                        quiet_s=self.settings.quiet_s,
                        threads=self.settings.threads,
                    )
                )
                for place, folder in zip(self.admitted.places, logs, strict=True)
            ]

            def environment(loaded: LoadedSpec, cases: Sequence[Case], command: str) -> Environment:
                env = environment_of(contexts[0], loaded, cases, command)
                names.update(name_children(grouped(cases), self.settings.device))
                return env

            yield Crew([LocalJob(context) for context in contexts], environment)


def environment_of(context: RunContext, loaded: LoadedSpec, cases: Sequence[Case], command: str) -> Environment:
    """What env.json says of a context's machine. Grows the pair first: env.json names its files, children too."""
    device = context.device or "cpu"
    gpu = context.gpu() if device.startswith("cuda") else None
    context.provide(cases)
    return provenance.environment(loaded, cases, device=device, command=command, gpu=gpu)


@contextlib.contextmanager
def local_site(
    settings: JobSettings, cases: Sequence[Case], jobs: int, *, timed: bool, lock_dir: Path | None
) -> Iterator[LocalSite]:
    """Hold a place for each job; GateError says why not, with what to do."""
    with admit(settings.device, jobs, timed=timed, lock_dir=lock_dir, gate_off=settings.gate_off) as admitted:
        problem = _too_many(settings.device, cases, admitted.places)
        if problem is not None and not settings.gate_off:
            raise GateError(problem)
        if problem is not None:
            admitted = Admitted(admitted.places, (*(admitted.ignored or ()), problem))
        yield LocalSite(admitted, settings)


def _too_many(device: str, cases: Sequence[Case], held: Sequence[Place]) -> str | None:
    """Why the pairs of jobs that share a CPU or a GPU do not fit into its memory at once, or None."""
    pair = next((case for case in cases if case.pair is not None), None)
    shared = max(Counter(held).values())
    if shared == 1 or pair is None or pair.pair is None:
        return None
    folders = [folder for folder in pair_folders(pair.pair, pair.folder, models_root()) if folder is not None]
    states = [gpus.state(place.gpu) for place in set(held) if place.gpu is not None]
    free = min((state.free_bytes for state in states if state is not None), default=None)
    return gate.job_memory_problem(folders, shared, gate.memory_available_bytes(), free, device)
