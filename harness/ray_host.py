"""A job on another host: what runs inside a Ray actor. It loads the same spec there; its lines go to the one writer.

The project, the spec and the checkpoints must be at the same paths on every host; the hosts' environments are compared.
Plain Python: `harness.ray_site` makes an actor of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.admission import admit
from harness.children import ChildKey, name_children
from harness.context import RunContext
from harness.errors import HarnessError, UsageError
from harness.events import RunEvent
from harness.locks import Place
from harness.pool import FlagKey, grouped
from harness.process import WORKER_COMMAND
from harness.record.lines import AnyLine, parse_line
from harness.record.privacy import Scrubber
from harness.site import JobSettings, environment_of
from harness.spec.load import load_spec
from harness.spec.plan import Case, plan

Item = tuple[str, str]  # ("line" | "event", JSON)


@dataclass(frozen=True)
class HostSetup:
    """What a host is told. `environ` holds the settings of the writer's process that decide bytes and paths."""

    settings: JobSettings
    folder: str
    spec: str
    spec_sha256: str
    environ: Mapping[str, str | None]
    timed: bool
    lock_dir: str | None = None


class Host:
    """One job. Every method that may be refused answers `{"error": words}` instead of raising."""

    def __init__(self, setup: HostSetup) -> None:
        self._setup = setup
        self._thread = ThreadPoolExecutor(1)  # children end with the thread that started them, so it is one that stays
        self._held = contextlib.ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="mtp-harness-"))
        self._scrubber = Scrubber.here()
        self._lines: list[AnyLine] = []
        self._names: dict[ChildKey, str] = {}
        self._cases: dict[str, Case] = {}
        self._box: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._context: RunContext | None = None

    def admit(self, lock: bool) -> dict[str, Any]:
        """Take this host's GPU, or, as the first job of a host, its CPU; answers what `--no-gate` went past."""
        setup, settings = self._setup, self._setup.settings
        try:
            os.chdir(setup.folder)
            for name, value in setup.environ.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            loaded = load_spec(setup.spec)
            if loaded.sha256 != setup.spec_sha256:
                raise UsageError(f"{setup.spec} is another file here")
            ignored: Sequence[str] | None = () if settings.gate_off else None
            place = None
            if lock:
                folder = Path(setup.lock_dir) if setup.lock_dir is not None else None
                admitted = self._held.enter_context(
                    admit(settings.device, timed=setup.timed, lock_dir=folder, gate_off=settings.gate_off)
                )
                place, ignored = admitted.places[0], admitted.ignored
            self._loaded = loaded
            self._cases = {case.id: case for case in plan(loaded)}
            self._context = RunContext(
                log_dir=self._folder / "logs",
                place=place or Place(settings.device),  # another job of this host holds its lock
                emit=lambda line: self._box.put(("line", line.model_dump_json())),
                on_event=self._tell,
                lines=self._lines,
                names=self._names,
                **context_settings(settings),
            )
        except FileNotFoundError:
            return {"error": f"a host has no folder {setup.folder}: the project must be at one path on all of them"}
        except HarnessError as error:
            return {"error": str(error)}
        return {"ignored": ignored}

    def environment(self, cases: Sequence[str], command: str) -> dict[str, Any]:
        """This host's env.json, as JSON without personal data."""
        assert self._context is not None
        chosen = [self._cases[case] for case in cases]
        try:
            env = self._thread.submit(environment_of, self._context, self._loaded, chosen, command).result()
        except HarnessError as error:
            return {"error": str(error)}
        self._names.update(name_children(grouped(chosen), self._setup.settings.device))
        env["env"].pop("CUDA_VISIBLE_DEVICES", None)  # which card Ray gave this job
        found: dict[str, Any] = json.loads(self._scrubber.scrub(json.dumps(env)))
        return found

    def run(self, case: str, earlier: Sequence[str]) -> Iterator[Item]:
        """Run a case, giving its lines and events as they arise. `earlier`: lines of other jobs since the last call."""
        assert self._context is not None
        self._lines += [parse_line(text) for text in earlier]
        future = self._thread.submit(self._run, self._context, self._cases[case])
        while (item := self._box.get()) is not None:
            yield item[0], self._scrubber.scrub(item[1])
        future.result()

    def _run(self, context: RunContext, case: Case) -> None:
        try:
            context.run(case)
        finally:
            self._box.put(None)

    def _tell(self, event: RunEvent) -> None:
        """Events inside a case; its begin and end are the pool's to tell."""
        self._box.put(("event", json.dumps({**asdict(event), "line": None})))

    def release(self, wanted: Sequence[FlagKey]) -> None:
        """End children by their flags."""
        if self._context is not None:
            keys = [tuple((name, value) for name, value in key) for key in wanted]
            self._thread.submit(self._context.release_flags, keys).result()

    def close(self) -> dict[str, str]:
        """End every child, free what is held, and give the logs by name."""
        if self._context is not None:
            self._thread.submit(self._context.close).result()
        self._held.close()
        logs = {
            file.name: self._scrubber.scrub(file.read_text(encoding="utf-8", errors="replace"))
            for file in sorted((self._folder / "logs").glob("*.log"))
        }
        shutil.rmtree(self._folder, ignore_errors=True)
        return logs


def context_settings(settings: JobSettings) -> dict[str, Any]:
    """A context's settings; the default worker is this host's own Python."""
    fields = asdict(settings)
    worker = fields.pop("worker")
    return {**fields, "command": worker or WORKER_COMMAND}
