"""What several verbs share: which specs and cases a command means, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click

from harness.errors import UsageError
from harness.spec import Case

SPECS_FOLDER = Path("specs")


def spec_paths(given: Sequence[str]) -> list[Path]:
    """The named specs, or every specs/*.yaml; a folder stands for the YAML files in it."""
    found: list[Path] = []
    for name in given or [str(SPECS_FOLDER)]:
        path = Path(name)
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(path.glob("*.yaml"))
        if not inside:
            raise UsageError(f"no *.yaml in {path.as_posix()}; name a spec, or write one with `harness new NAME`")
        found += inside
    if not given and not SPECS_FOLDER.is_dir():
        raise UsageError("no specs/ folder here; name a spec, or write one with `harness new NAME`")
    return list(dict.fromkeys(found))


def warn_stray_flags() -> None:
    """One line on stderr when the shell sets engine flags: no child would see them."""
    from harness.process import stray_flags

    if names := ", ".join(stray_flags()):
        text = f"warning: {names} set in the shell has no effect on a spec, and `harness run` refuses to start"
        click.echo(f"{text}; unset it, or put it into the spec's matrix", err=True)


def only_greedy(temperature: float, batch: int) -> None:
    """Raise UsageError for sampling or for several sequences, in words."""
    if temperature != 0:
        raise UsageError(f"temperature {temperature:g} is refused: greedy decoding only (0)")
    if batch != 1:
        raise UsageError(f"batch {batch} is refused: one sequence at a time (1)")


class _Device(click.ParamType[str]):
    name = "device"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", value):
            self.fail(f"'{value}' is no device; use cpu, cuda or cuda:N", param, ctx)
        return value


DEVICE = _Device()


def select(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """The cases whose id equals or contains one of the words; all without words. Raises UsageError for no match."""
    if not only:
        return list(cases)
    chosen: list[Case] = []
    for word in only:
        exact = [case for case in cases if word in (case.id, case.name)]
        matching = exact or [case for case in cases if word in case.id]
        if not matching:
            names = ", ".join(case.name for case in cases[:12]) + (", ..." if len(cases) > 12 else "")
            raise UsageError(f"--only {word}: no case has that in its id; cases: {names}")
        chosen += matching
    wanted = {case.id for case in chosen}
    return [case for case in cases if case.id in wanted]
