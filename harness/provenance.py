"""Where a run happened and what it ran on: `env.json`, and the fingerprint that a resume must match.

Without user names, host names or absolute paths: checkpoints and prompts are named as the spec names them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from harness import gate
from harness.process import THREAD_SETTINGS
from harness.record.privacy import Scrubber
from harness.spec.load import LoadedSpec
from harness.spec.pair_model import CheckpointRef
from harness.spec.plan import Case
from harness.spec.resolve import models_root, pair_folders, prompt_text

SCHEMA_VERSION = 1
PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "pydantic", "scipy", "matplotlib")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")
SOURCE_FOLDERS = ("harness", "engine", "kernels")
_ROOT = Path(__file__).resolve().parent.parent


def utc_now() -> str:
    """This moment in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command as a reader can type it: the program's name without its folder, personal paths replaced."""
    words = list(sys.argv if argv is None else argv)
    name = Path(words[0]).name if words else "harness"
    first = "harness" if name in ("harness", "__main__.py") else name
    return Scrubber.here().scrub(" ".join([first, *(shlex.quote(word) for word in words[1:])]))


def environment(
    loaded: LoadedSpec, cases: Sequence[Case], *, device: str, command: str, gpu: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Everything env.json holds. `fingerprint` covers what a figure depends on, not when or how it was asked for."""
    pair, root = loaded.spec.pair, models_root()
    folders = dict(zip(("target", "drafter"), pair_folders(pair, loaded.folder, root), strict=True)) if pair else {}
    refs = {"target": pair.target, "drafter": pair.drafter} if pair is not None else {}
    env: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "started_utc": utc_now(),
        "device": device,
        "spec": {"path": loaded.id_path, "sha256": loaded.sha256},
        "prompts": prompt_hashes(cases),
        "source": source(),
        "checkpoints": {role: checkpoint(ref, folders[role]) for role, ref in refs.items()},
        **machine(),
        "env": {name: os.environ[name] for name in THREAD_SETTINGS if name in os.environ},
    }
    if gpu:
        env["gpu"] = dict(gpu)
    env["fingerprint"] = fingerprint(env)
    return env


def fingerprint(env: Mapping[str, Any]) -> str:
    """One hash over what the figures depend on: spec, prompts, code, weights, machine, versions, device, settings."""
    parts = {name: env.get(name) for name in ("spec", "prompts", "checkpoints", "versions", "device", "env", "gpu")}
    parts["source"] = (env.get("source") or {}).get("source_sha256")
    parts["host"] = env.get("host")
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def changed_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which fingerprinted parts differ between two env.json, as dotted names."""
    changed: list[str] = []
    for name in ("spec", "prompts", "checkpoints", "host", "versions", "device", "env", "gpu"):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changed += [f"{name}.{key}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        else:
            changed.append(name)
    if (before.get("source") or {}).get("source_sha256") != (now.get("source") or {}).get("source_sha256"):
        changed.append("source code")
    return changed


def machine() -> dict[str, Any]:
    """Host, versions and the gate's readings: what `harness env` prints of this machine."""
    state = gate.reading()
    cpu, flags = cpu_model()
    memory = memory_total_gib()
    return {
        "host": {
            "cpu": cpu,
            "cpu_flags": flags,
            "cores": state.cores,
            "memory_gib": memory,
            "kernel": f"{platform.system()} {platform.release()}",
            "machine": platform.machine(),
        },
        "versions": versions(),
        "gate": {
            "load1": state.load1,
            "cores": state.cores,
            "busy": state.busy,
            "memory_available_gib": state.memory_available_gib,
            "note": state.note,
        },
    }


def cpu_model() -> tuple[str, list[str]]:
    """The CPU's name and those of its instruction sets that change bits or speed here."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return name, []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
        elif not line.strip() and flags:
            break  # the other cores say the same
    return name, [flag for flag in CPU_FLAGS if flag in flags]


def memory_total_gib() -> float | None:
    """Memory of the machine in GiB, or None where it does not say."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


WRITTEN = ("docs/benchmark_results", "README.md")
"""What a run writes itself: a second one from the same tree is as clean as the first."""

_BLOCK = re.compile(r"<!-- BEGIN generated: .*?<!-- END generated: [^>]*-->", re.DOTALL)


def versions() -> dict[str, str]:
    """Versions of what computes, without importing any of it."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def source() -> dict[str, Any]:
    """Commit and whether the tree differs from it, and a hash over the code itself, which holds without git too."""
    digest = hashlib.sha256()
    for folder in SOURCE_FOLDERS:
        for file in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(file.relative_to(_ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in WRITTEN)) if commit else None
    if status is not None and _differs_outside_blocks("README.md"):
        status += " M README.md"
    return {
        "commit": commit,
        "branch": _git("rev-parse", "--abbrev-ref", "HEAD") if commit else None,
        "dirty": bool(status) if status is not None else None,
        "source_sha256": digest.hexdigest(),
    }


def _differs_outside_blocks(path: str) -> bool:
    """Whether a file differs from the commit's by more than the generated blocks that a run writes into it."""
    committed, file = _git("show", f"HEAD:{path}"), _ROOT / path
    if committed is None or not file.is_file():
        return committed is not None or file.is_file()
    present = file.read_text(encoding="utf-8", errors="replace")
    return _BLOCK.sub("", committed).strip() != _BLOCK.sub("", present).strip()


def _git(*words: str) -> str | None:
    """Output of a git command in this package's repository, or None without git or repository."""
    git = shutil.which("git")
    if git is None or not (_ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run([git, *words], cwd=_ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def checkpoint(ref: CheckpointRef, path: Path | None) -> dict[str, Any] | None:
    """A checkpoint's name, file sizes and the hashes of config, index, weights and text files; None when not here.

    The name is the spec's; that of a grown pair is its folder's, which says what it is.
    """
    if path is None:
        return None
    return {
        "name": ref.path if path.name == PurePosixPath(ref.path).name else path.name,
        "files": {file.name: file.stat().st_size for file in sorted(path.glob("*.safetensors"))},
        "config_sha256": _sha256(path / "config.json"),
        "index_sha256": _sha256(path / "model.safetensors.index.json"),
        "weights_sha256": _weights_sha256(path),
        "text_sha256": _text_sha256(path),
    }


TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def _text_sha256(path: Path) -> str | None:
    """Hash over what turns text into ids and ends it, as the child's fingerprint has it; None without a tokenizer."""
    if not (path / TEXT_FILES[0]).is_file():
        return None
    digest = hashlib.sha256()
    for name in TEXT_FILES:
        digest.update(f"{name} {_sha256(path / name)}\n".encode())
    return digest.hexdigest()


SMALL_BYTES = 64 * 2**20


def _weights_sha256(path: Path) -> str | None:
    """Hash over all shards of a small checkpoint; None for one whose reading would take long."""
    files = sorted(path.glob("*.safetensors"))
    if not files or sum(file.stat().st_size for file in files) > SMALL_BYTES:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _sha256(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def prompt_hashes(cases: Sequence[Case]) -> dict[str, str]:
    """Hash of each prompt's text, by file or name."""
    hashes: dict[str, str] = {}
    for case in cases:
        for prompt in getattr(case.check, "prompts", None) or ():
            text = prompt_text(prompt, case.folder)
            hashes[prompt.file or prompt.name or "text"] = hashlib.sha256(text.encode()).hexdigest()
    return hashes
