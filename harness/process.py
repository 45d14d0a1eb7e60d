"""Child processes: one per flag cell, with an environment built from an allow-list, and never left behind.

The parent writes JSON lines to the child's stdin and reads JSON lines from its stdout; stderr goes to a log file.
A child that dies, hangs or speaks anything else becomes a `RunError` that says how it ended and what it last logged.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn

from pydantic import ValidationError

from harness.errors import RunError
from harness.protocol import AnyEvent, Failure, Job, LogEvent, Ready, Result, Setup, parse_event

ALLOWED = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "HARNESS_MODELS",
    "HARNESS_MARLIN_LIBRARY",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TRITON_CACHE_DIR",
)
THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
FLAG_PREFIXES = ("MLXCEL_", "MLX_")
LOAD_TIMEOUT_S = 900.0
JOB_TIMEOUT_S = 3600.0
TERM_GRACE_S = 5.0
CLOSE_GRACE_S = 10.0
_ROOT = Path(__file__).resolve().parent.parent
WORKER_COMMAND = (sys.executable, "-m", "harness.worker")


class ChildMemoryError(RunError):
    """A child could not get the memory it needed."""


class ChildInputError(RunError):
    """The engine refused what it was given (checkpoint, prompt, configuration), in one line."""


def stray_flags(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Flags set in this process's own environment; a run must take them from the spec alone."""
    source = os.environ if environ is None else environ
    return {name: value for name, value in sorted(source.items()) if name.startswith(FLAG_PREFIXES)}


def child_environment(flags: Mapping[str, str | None], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The allow-listed part of `environ`, the cell's flags, and what the child needs to find this package."""
    source = os.environ if environ is None else environ
    built = {name: source[name] for name in ALLOWED if name in source}
    built.update({name: value for name, value in flags.items() if value is not None})
    built["PYTHONPATH"] = str(_ROOT)
    built["PYTHONUTF8"] = "1"
    built["PYTHONHASHSEED"] = "0"
    return built


def describe_exit(code: int) -> str:
    """How a process ended, in words: an exit code, or the signal's name and what usually sends it."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        return f"{name} (the system may have run out of memory)" if name == "SIGKILL" else name
    return f"signal {-code}"


class Child:
    """One child process and its conversation. Use as a context manager, or call `close`."""

    def __init__(
        self,
        name: str,
        flags: Mapping[str, str | None],
        log_path: Path,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        on_event: Callable[[AnyEvent], None] | None = None,
        keep_log: bool = True,
        pinned: Mapping[str, str] | None = None,
    ) -> None:
        """`log_path` gets the child's stderr; with `keep_log` False messages do not send the reader there.

        `pinned` goes into the environment last: which GPU the child may see.
        """
        self.name = name
        self.flags = dict(flags)
        self.log_path = log_path
        self.ready: Ready | None = None
        self.ready_s = 0.0
        self._on_event = on_event
        self._see_log = f"; see {log_path.parent.name}/{log_path.name}" if keep_log else ""
        self._jobs = 0
        self._ended = False  # killed or reaped: its process id may belong to somebody else by now
        self._log_from = log_path.stat().st_size if log_path.exists() else 0
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = log_path.open("ab")
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=child_environment(flags) | dict(pinned or {}),
                start_new_session=True,  # its own group, so that whatever it starts ends with it
            )
        except OSError as error:
            self._log.close()
            raise RunError(f"child {name}: cannot start {command[0]}: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    # ---- conversation -------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Process id, which is also its group's."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can take another job."""
        return not self._ended and self._process.poll() is None and not self._stdin.closed

    def start(self, setup: Setup, timeout_s: float = LOAD_TIMEOUT_S) -> Ready:
        """Send the setup and wait until the pair is loaded."""
        began = time.monotonic()
        self._send(setup.model_dump_json())
        for event in self._events(timeout_s, "loading the pair"):
            if isinstance(event, Ready):
                self.ready, self.ready_s = event, time.monotonic() - began
                return event
            if isinstance(event, Failure):
                self.kill()
                self._raise(event)
        raise RunError(f"child {self.name}: no answer")

    def run(
        self,
        kind: str,
        case: str = "",
        args: Mapping[str, object] | None = None,
        *,
        timeout_s: float = JOB_TIMEOUT_S,
        on_event: Callable[[AnyEvent], None] | None = None,
    ) -> Result:
        """Run one job to its end; every other event goes to `on_event`. RunError; out of memory ends the child."""
        self._jobs += 1
        job = Job.model_validate({"id": self._jobs, "kind": kind, "case": case, "args": dict(args or {})})
        self._send(job.model_dump_json())
        for event in self._events(timeout_s, kind):
            if isinstance(event, Result | Failure) and event.job not in (None, job.id):
                self._broken(f"answered job {event.job} while job {job.id} was running")
            if isinstance(event, Result):
                return event
            if isinstance(event, Failure):
                if event.kind == "memory":
                    self.kill()  # what it still holds would starve the next job
                self._raise(event)
            if on_event:
                on_event(event)
        raise RunError(f"child {self.name}: no answer")

    def _send(self, text: str) -> None:
        try:
            self._stdin.write(text.encode() + b"\n")
            self._stdin.flush()
        except (BrokenPipeError, ValueError, OSError):
            self._died()

    def _events(self, timeout_s: float, doing: str) -> Iterator[AnyEvent]:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                self.kill()
                raise RunError(
                    f"child {self.name}: {doing} took longer than {timeout_s:g} s and was ended{self._see_log}"
                ) from None
            if line is None:
                self._died()
            try:
                event = parse_event(line)
            except ValidationError:
                self._broken(f"wrote {line[:80].decode(errors='replace').strip()!r}")
            if isinstance(event, LogEvent) and self._on_event:
                self._on_event(event)
            yield event

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    # ---- bad ends -----------------------------------------------------------------------------------------------

    def last_log_line(self) -> str:
        """Last line that this child wrote to its log, or an empty string."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as file:
            file.seek(self._log_from)
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
            return lines[-1] if lines else ""
        return ""

    def _raise(self, failure: Failure) -> NoReturn:
        kinds = {"memory": ChildMemoryError, "input": ChildInputError}
        error = kinds.get(failure.kind, RunError)
        hint = self._see_log if failure.kind == "internal" else ""
        raise error(f"{failure.message}{hint}")

    def _broken(self, what: str) -> NoReturn:
        self.kill()
        raise RunError(f"child {self.name} {what}, which is not the protocol{self._see_log}")

    def _died(self) -> NoReturn:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(TERM_GRACE_S)
        code = self._process.poll()
        self.kill()
        how = "closed its output" if code is None else f"ended with {describe_exit(code)}"
        last = self.last_log_line()
        raise RunError(f"child {self.name} {how}" + (f"; its last log line: {last}" if last else "; its log is empty"))

    # ---- ending -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the child: its pipe first, then, if it does not go, its group."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the child's whole group: TERM, then KILL. Safe to call twice."""
        if self._ended:
            return
        self._ended = True
        for number, grace in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, TERM_GRACE_S)):
            if self._process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what the child itself started and left
        with contextlib.suppress(OSError):
            self._stdin.close()
        self._reader.join(TERM_GRACE_S)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()
