"""`--executor ray`: jobs as Ray actors, on as many hosts as the cluster has; their lines go to the one writer."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import GateError, UsageError
from harness.events import RunEvent
from harness.gpus import VISIBLE
from harness.grown import CACHE_VARIABLE
from harness.pool import FlagKey, JobLost, Sink
from harness.process import THREAD_SETTINGS
from harness.provenance import changed_parts, fingerprint
from harness.ray_host import Host, HostSetup
from harness.record.lines import AnyLine, CaseLine, parse_line
from harness.site import Crew, Environment, JobSettings
from harness.spec.load import LoadedSpec
from harness.spec.plan import Case
from harness.spec.resolve import MODELS_VARIABLE

START_S = 180.0  # for the cluster to give every job its place
CLOSE_S = 60.0
SENT = (*(name for name in THREAD_SETTINGS if name != VISIBLE), MODELS_VARIABLE, CACHE_VARIABLE)
HARMLESS = ("host.memory_gib", "host.kernel")  # may differ between hosts of one kind, and change no byte


def import_ray() -> Any:
    """The package, or a UsageError that says how to get it."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UsageError("--executor ray needs Ray on every host: pip install 'mtp-harness[ray]'") from None


class RayJob:
    """One actor."""

    def __init__(self, ray: Any, number: int, actor: Any, sink: Sink, log: list[tuple[int, AnyLine]]) -> None:
        self._ray, self._number, self._actor, self._sink, self._log = ray, number, actor, sink, log
        self._seen = 0  # lines of the run that the actor knows

    def run(self, case: Case) -> CaseLine:
        """Run a case over there; raises JobLost when the host goes away."""
        known = list(self._log)
        earlier = [line.model_dump_json() for owner, line in known[self._seen :] if owner != self._number]
        self._seen = len(known)
        end: CaseLine | None = None
        try:
            for item in self._actor.run.options(num_returns="streaming").remote(case.id, earlier):
                kind, text = self._ray.get(item)
                if kind == "line":
                    line = parse_line(text)
                    self._sink.emit(line)
                    self._log.append((self._number, line))
                    end = line if isinstance(line, CaseLine) else end
                else:
                    self._sink.notify(RunEvent(**json.loads(text)))
        except self._ray.exceptions.RayTaskError:
            raise  # a bug over there, with its traceback
        except self._ray.exceptions.RayError as error:
            raise JobLost(f"the host of job {self._number + 1} is gone ({type(error).__name__})") from None
        if end is None:
            raise JobLost(f"the host of job {self._number + 1} ended the case without a word")
        return end

    def release(self, wanted: Iterable[FlagKey]) -> None:
        """End children by their flags; the actor does it before its next case."""
        self._actor.release.remote(sorted(set(wanted)))

    def close(self) -> None:
        """Children end with `finish`; until then they are idle."""
        self._actor.release.remote([])

    def finish(self, logs: Path) -> None:
        """End the children over there and fetch the logs; a host that is gone has none."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            found: Mapping[str, str] = self._ray.get(self._actor.close.remote(), timeout=CLOSE_S)
            logs.mkdir(parents=True, exist_ok=True)
            for name, text in found.items():
                with (logs / name).open("a", encoding="utf-8") as file:
                    file.write(text)

    def kill(self) -> None:
        """End the actor; the kernel ends its children with it."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)


class RaySite:
    """Actors that hold their places."""

    def __init__(self, ray: Any, actors: Sequence[Any], ignored: tuple[str, ...] | None) -> None:
        self._ray, self._actors, self._ignored = ray, list(actors), ignored

    @property
    def ignored(self) -> tuple[str, ...] | None:
        """What the hosts' gates would have refused."""
        return self._ignored

    @contextlib.contextmanager
    def crew(self, logs: Sequence[Path], sink: Sink, earlier: Sequence[AnyLine]) -> Iterator[Crew]:
        """A job per actor."""
        log: list[tuple[int, AnyLine]] = [(-1, line) for line in earlier]
        jobs = [RayJob(self._ray, number, actor, sink, log) for number, actor in enumerate(self._actors)]
        yield Crew(jobs, self._environment)
        for job, folder in zip(jobs, logs, strict=True):
            job.finish(folder)

    def _environment(self, loaded: LoadedSpec, cases: Sequence[Case], command: str) -> Environment:
        """The hosts' env.json, which must be one; the first host answers first, so that it grows a missing pair."""
        ids = [case.id for case in cases]
        first, *others = self._actors
        envs = [_get(self._ray, [first.environment.remote(ids, command)])[0]]
        envs += _get(self._ray, [actor.environment.remote(ids, command) for actor in others])
        for env in envs:
            env["fingerprint"] = fingerprint(env)
        differing = sorted({part for env in envs[1:] for part in changed_parts(envs[0], env)} - set(HARMLESS))
        if differing:
            raise GateError(f"the hosts differ in {', '.join(differing)}; a record describes one kind of machine")
        return dict(envs[0])


@contextlib.contextmanager
def ray_site(
    settings: JobSettings, loaded: LoadedSpec, jobs: int, *, timed: bool, lock_dir: Path | None
) -> Iterator[RaySite]:
    """A place for each job on the cluster that $RAY_ADDRESS names, else on one that is started here and ends with us.

    Raises UsageError without Ray, GateError for a cluster that is too small or a host that is not fit.
    """
    ray = import_ray()
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            _connect(ray)
            stack.callback(ray.shutdown)
        cuda = settings.device.startswith("cuda")
        _large_enough(ray, jobs, "GPU" if cuda else "CPU")
        setup = HostSetup(
            settings=settings,
            folder=str(Path.cwd()),
            spec=str(loaded.path),
            spec_sha256=loaded.sha256,
            environ={name: os.environ.get(name) for name in SENT},
            timed=timed,
            lock_dir=str(lock_dir) if lock_dir is not None else None,
        )
        make = ray.remote(Host).options(num_cpus=1, num_gpus=int(cuda), scheduling_strategy="SPREAD", max_restarts=0)
        actors = [make.remote(setup) for _ in range(jobs)]
        for actor in actors:
            stack.callback(ray.kill, actor)
        nodes = _get(ray, [actor.__ray_call__.remote(_node) for actor in actors])
        locking = [cuda or node not in nodes[:number] for number, node in enumerate(nodes)]
        answers = _get(ray, [actor.admit.remote(lock) for actor, lock in zip(actors, locking, strict=True)])
        ignored = tuple(dict.fromkeys(words for answer in answers for words in answer["ignored"] or ()))
        yield RaySite(ray, actors, ignored if settings.gate_off else None)


def _node(host: Host) -> str:
    """The node that an actor is on."""
    return str(import_ray().get_runtime_context().get_node_id())


def _connect(ray: Any) -> None:
    """Join or start a cluster; Ray's own signal handler does not replace ours."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if main else None
    try:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise GateError(f"no Ray cluster: {reason}; set RAY_ADDRESS, or unset it to start one here") from None
    finally:
        if main and before is not None:
            signal.signal(signal.SIGTERM, before)


def _large_enough(ray: Any, jobs: int, resource: str) -> None:
    have = int(ray.cluster_resources().get(resource, 0))
    if have < jobs:
        raise GateError(
            f"--jobs {jobs} takes a {resource} for each job, and the cluster has {have}; ask for fewer jobs"
        )


def _get(ray: Any, references: Sequence[Any]) -> list[Any]:
    """Answers of all actors; GateError for one that refuses, is gone or does not come."""
    try:
        answers: list[Any] = ray.get(list(references), timeout=START_S)
    except ray.exceptions.GetTimeoutError:
        raise GateError(f"the cluster gave no place for every job within {START_S:g} s; ask for fewer jobs") from None
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError as error:
        raise GateError(f"a job's host is gone ({type(error).__name__})") from None
    refused = [answer["error"] for answer in answers if isinstance(answer, dict) and "error" in answer]
    if refused:
        raise GateError("; ".join(dict.fromkeys(refused)))
    return answers
