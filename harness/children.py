"""What tells the children of a run apart, and what they are called: the same names whichever of them starts first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from harness.estimate import child_environments
from harness.spec.plan import Case, child_key
from harness.spec.resolve import models_root, pair_folders

ChildKey = tuple[str, str, str, tuple[tuple[str, str], ...]]


def key_of(device: str, case: Case, env: Mapping[str, str | None]) -> ChildKey:
    """What tells children apart: device, pair and flags."""
    if case.pair is None:
        return (device, "", "", child_key(env))
    target, drafter = (str(folder) for folder in pair_folders(case.pair, case.folder, models_root()))
    return (device, target, drafter, child_key(env))


def name_child(names: dict[ChildKey, str], case: Case, env: Mapping[str, str | None], key: ChildKey) -> str:
    """A child's name, added to `names`: "default" without flags, else the cell's labels, else the flags; unique."""
    if key in names:
        return names[key]
    name = "default"
    if key[3]:
        axes = {axis: label for axis, label in case.cell if axis in case.check.matrix}
        env_axes = [a for a in axes if getattr(case.check.matrix[a], "env", None) is not None]
        if env_axes and child_key(case.env) == key[3]:
            name = "+".join(f"{axis}:{axes[axis]}" for axis in env_axes)
        else:
            name = "+".join(f"{flag}:{value}" for flag, value in key[3])
    taken = set(names.values())
    unique, number = name, 2
    while unique in taken:
        unique, number = f"{name}-{number}", number + 1
    names[key] = unique
    return unique


def name_children(cases: Iterable[Case], device: str) -> dict[ChildKey, str]:
    """Names of all children that these cases start, whichever of them comes first."""
    names: dict[ChildKey, str] = {}
    for case in cases:
        for env in child_environments(case):
            name_child(names, case, env, key_of(device, case, env))
    return names


def file_name(name: str) -> str:
    """A child's name as that of a file."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-") or "child"
