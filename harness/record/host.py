"""The ten or so facts about the machine that a reader needs on the page; env.json holds the rest.

Absent facts become words. No host name, user name or path is ever among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.record.lines import ChildLine
from harness.record.table import plural

ABSENT = "not recorded"


def _get(env: Mapping[str, Any], dotted: str) -> Any:
    value: Any = env
    for part in dotted.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def device_label(env: Mapping[str, Any], children: Sequence[ChildLine]) -> str:
    """`CPU`, or the GPU's name: what stands in titles."""
    named = children[0].device if children else _get(env, "device")
    text = str(named or "no device")
    return text.upper() if text.lower() == "cpu" else text


def host_rows(env: Mapping[str, Any], children: Sequence[ChildLine]) -> dict[str, str]:
    """Label -> words, in the order shown."""
    versions: dict[str, Any] = dict(_get(env, "versions") or {})
    for child in children:
        versions |= child.versions
    threads = sorted({child.threads for child in children})
    gate = _get(env, "gate") or {}
    rows = {
        "Device": device_label(env, children),
        "CPU": _cpu(env),
        "Threads of the child": " or ".join(map(str, threads)) if threads else ABSENT,
        "Memory": f"{float(memory):.1f} GiB" if (memory := _get(env, "host.memory_gib")) is not None else ABSENT,
        "OS": " ".join(str(part) for part in (_get(env, "host.kernel"), _get(env, "host.machine")) if part) or ABSENT,
        "Versions": _versions(versions),
        "Commit": _commit(env),
        "Load at the start": _load(gate),
        "Spec SHA-256": str(_get(env, "spec.sha256") or ABSENT)[:16],
        "Environment fingerprint": str(_get(env, "fingerprint") or ABSENT)[:16],
    }
    gpu = _get(env, "gpu")
    if isinstance(gpu, Mapping):
        wanted = ("name", "compute_capability", "driver", "power_limit_w")
        rows["GPU"] = ", ".join(f"{key.replace('_', ' ')} {gpu[key]}" for key in wanted if gpu.get(key) is not None)
    return rows


def _cpu(env: Mapping[str, Any]) -> str:
    name, cores, flags = (_get(env, f"host.{key}") for key in ("cpu", "cores", "cpu_flags"))
    parts = [str(name)] if name else []
    parts += [plural(int(cores), "core")] if cores else []
    parts += [" ".join(map(str, flags))] if flags else []
    return ", ".join(parts) or ABSENT


def _versions(versions: Mapping[str, Any]) -> str:
    first = [name for name in ("python", "torch", "triton", "numpy", "safetensors") if versions.get(name)]
    return ", ".join(f"{name} {versions[name]}" for name in first) or ABSENT


def _commit(env: Mapping[str, Any]) -> str:
    commit, dirty = _get(env, "source.commit"), _get(env, "source.dirty")
    if not commit:
        source = _get(env, "source.source_sha256")
        return f"no commit; source SHA-256 {str(source)[:16]}" if source else ABSENT
    state = {True: "with uncommitted changes", False: "clean"}.get(dirty, "state not recorded")
    return f"{str(commit)[:12]} ({state})"


def _load(gate: Mapping[str, Any]) -> str:
    if gate.get("load1") is None:
        return ABSENT
    note = gate.get("note") or ("the machine was busy" if gate.get("busy") else "quiet")
    return f"{float(gate['load1']):.2f} ({note})"
