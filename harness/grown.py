"""Grown pairs for specs with `otherwise: {grow: ...}`: where one is cached, and building one in a child process.

The cache is `$HARNESS_CACHE` or `~/.cache/mtp-harness`. A build is named by a hash over the tool's source, the nano
pair and the seed; the cache keeps one a geometry. This process imports no torch: the tool runs in a child.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from harness.errors import GateError, RunError
from harness.process import child_environment, describe_exit

CACHE_VARIABLE = "HARNESS_CACHE"
SEED = 0
NEEDED_GB = {"12b": 11.5, "31b": 18.5}
"""Disk that a build takes, in GB, with a little to spare: a machine without it skips, as one without the weights."""
LOCK_TIMEOUT_S = 900.0
_ROOT = Path(__file__).resolve().parent.parent
_TOOL = _ROOT / "tools" / "grow_pair.py"
_NANO = tuple(_ROOT / "specs" / "checkpoints" / f"gemma4-nano-it-{part}4bit" for part in ("", "assistant-"))
_SOURCES = ("tools/grow_pair.py", "tools/grow/*.py", "engine/quantize.py")
_NOT_BUILT_FROM = ("README.md", "data_manifest.json")
COMMAND = (sys.executable, "-m", "harness.worker.grow")

Folders = tuple[Path, Path]
Say = Callable[[str], None]


def cache_root(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of all grown pairs."""
    value = (os.environ if environ is None else environ).get(CACHE_VARIABLE, "")
    return (Path(value) if value else Path("~/.cache/mtp-harness")).expanduser() / "grown"


def existing(geometry: str, root: Path | None = None) -> Folders | None:
    """The cached pair of this source, this nano pair and the seed, or None; hashes nothing without a cache."""
    root = root or cache_root()
    if not root.is_dir():
        return None
    folders = folders_of(geometry, root)
    return folders if all(folder.is_dir() for folder in folders) else None


def folders_of(geometry: str, root: Path) -> Folders:
    """Where the target and the drafter of a geometry are, or will be."""
    folder = root / f"{geometry}-{build_hash(geometry)}"
    return folder / f"gemma4-{geometry}-grown-it", folder / f"gemma4-{geometry}-grown-it-assistant"


@functools.cache
def build_hash(geometry: str, seed: int = SEED) -> str:
    """Twelve digits over everything that decides the bytes."""
    digest = hashlib.sha256(f"{geometry} {seed}".encode())
    files = [file for pattern in _SOURCES for file in sorted(_ROOT.glob(pattern))]
    files += [file for folder in _NANO for file in sorted(folder.glob("*")) if file.name not in _NOT_BUILT_FROM]
    for file in files:
        digest.update(file.relative_to(_ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Grower:
    """Builds pairs; tests give it another command."""

    command: Sequence[str] = COMMAND
    lock_timeout_s: float = LOCK_TIMEOUT_S

    def obstacle(self, geometry: str) -> str | None:
        """Why this machine cannot build the pair, or None; CUDA and memory are the spec's own requirement."""
        if not _TOOL.is_file() or not all(folder.is_dir() for folder in _NANO):
            return "this installation has no tools/grow_pair.py or no nano pair to grow"
        place = cache_root()
        while not place.exists() and place != place.parent:
            place = place.parent
        free, needed = shutil.disk_usage(place).free / 1e9, NEEDED_GB.get(geometry, 0.5)
        if free < needed:
            return f"growing it takes {needed:g} GB of disk under ${CACHE_VARIABLE}, {free:.1f} GB are free"
        return None

    def grow(self, geometry: str, device: str, log: Path, say: Say) -> Folders:
        """The cached pair, built first if need be; one process at a time. Raises GateError or RunError in one line."""
        root = cache_root()
        try:
            root.mkdir(parents=True, exist_ok=True)
            with self._locked(root / f"{geometry}.lock", geometry, say):
                if (found := existing(geometry, root)) is not None:
                    return found
                self._build(geometry, device, root, log, say)
        except OSError as error:
            raise GateError(f"cannot write under ${CACHE_VARIABLE}: {error.strerror or error}") from None
        found = existing(geometry, root)
        if found is None:
            raise RunError(f"growing {geometry} ended well and left no pair; see {log.parent.name}/{log.name}")
        return found

    @contextlib.contextmanager
    def _locked(self, path: Path, geometry: str, say: Say) -> Iterator[None]:
        lock = FileLock(path, mode=0o666)
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                say(f"another process is growing the {geometry} pair: waiting for it")
                lock.acquire(timeout=self.lock_timeout_s)
        except Timeout:
            raise GateError(
                f"another process has been growing the {geometry} pair for {self.lock_timeout_s:.0f} s; end it"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def _build(self, geometry: str, device: str, root: Path, log: Path, say: Say) -> None:
        """Older builds of the geometry go first: each takes as much disk as a real checkpoint."""
        for old in root.glob(f"{geometry}-*"):
            shutil.rmtree(old, ignore_errors=True)
        out = folders_of(geometry, root)[0].parent
        say(f"growing the {geometry} pair from nano (not Google's weights) on {device}")
        words = ["--geometry", geometry, "--out", str(out), "--seed", str(SEED), "--device", device]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            start = log.stat().st_size
            code = _run([*self.command, *words], errors, lambda text: say(f"growing {geometry}: {text}"))
        if code != 0:
            shutil.rmtree(out, ignore_errors=True)
            last = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
            reason = last[-1][:500] if last else describe_exit(code)
            raise RunError(f"growing the {geometry} pair failed: {reason}; see {log.parent.name}/{log.name}")


def _run(command: Sequence[str], errors: IO[bytes], say: Say) -> int:
    """Run the tool, its lines to `say`; whatever ends this, the tool and its group end too."""
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=child_environment({}),
            start_new_session=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise RunError(f"growing a pair: cannot start {command[0]}: {error.strerror}") from None
    assert process.stdout is not None
    try:
        with process.stdout:
            for line in process.stdout:
                if line.strip():
                    say(line.strip())
        return int(process.wait())
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
