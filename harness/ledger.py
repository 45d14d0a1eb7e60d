"""The ledger: every flag and knob of a child, asked for against in force, from which source and when it is read. Pure.

The child reports what it read (`Setting`); this module adds where it was asked for, and finds what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.flags import FLAGS, FlagError, read_flags
from harness.errors import CheckFailed
from harness.record.lines import PathLine, Setting

DEFAULT_STAGE = "rowwise"


def sources(
    device: str, needs_cuda: bool, given_threads: int | None, threads: int | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Where a run's device and number of threads come from."""
    chosen = device != ("cuda" if needs_cuda else "cpu")
    shared = threads is None and "OMP_NUM_THREADS" in environ
    return {
        "device": "command line" if chosen else "spec" if needs_cuda else "default",
        "threads": "command line" if given_threads else "environment" if shared else "default",
    }


def annotate(
    settings: Sequence[Setting],
    env: Mapping[str, str | None],
    environ: Mapping[str, str],
    sources: Mapping[str, str],
) -> tuple[Setting, ...]:
    """The child's rows with their source: `env` is what the spec sets, `environ` the parent's own environment.

    `sources` names those that neither of them knows, such as the number of threads.
    """
    found = []
    for row in settings:
        asked, source = row.requested, sources.get(row.name, "default")
        if row.name in FLAGS:
            source = "spec" if env.get(row.name) is not None else "environment" if asked is not None else "default"
        elif row.name not in sources and row.name in environ:
            asked, source = environ[row.name], "environment"
        found.append(row.model_copy(update={"requested": asked, "source": source}))
    return tuple(found)


def difference(row: Setting) -> str | None:
    """How what is in force differs from what was asked for, or None."""
    wanted = row.requested
    if row.name in FLAGS:
        flag = FLAGS[row.name]
        try:
            wanted = str(int(flag.parse(flag.default if wanted is None else wanted)))
        except FlagError as error:
            return str(error)
    if wanted is None or row.effective == wanted:
        return None
    if row.name == "device" and row.effective.partition(":")[0] == wanted:
        return None  # "cuda" is any GPU
    return f"{row.name}={wanted} was asked for, {row.effective} is in force"


def first_difference(settings: Sequence[Setting]) -> str | None:
    """The first row that differs, in words, or None."""
    return next((text for row in settings if (text := difference(row)) is not None), None)


def path_difference(line: PathLine, asked: Mapping[str, Any]) -> str | None:
    """How the stage and block size that a job really ran differ from its arguments, or None."""
    stage = asked.get("stage") or DEFAULT_STAGE
    if line.stage != stage:
        return f"stage {stage} was asked for, {line.stage} is in force"
    sizes = asked.get("block_sizes") or [asked.get("block_size")]
    if line.block_size not in sizes:
        return f"block size {' or '.join(map(str, sizes))} was asked for, {line.block_size} is in force"
    return None


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
