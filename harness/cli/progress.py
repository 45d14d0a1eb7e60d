"""How a run is watched: bars on a terminal, lines elsewhere, JSON for programs, next to nothing when quiet."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol

import click

from harness.events import RunEvent
from harness.record.lines import CaseLine

BAD = ("fail", "error")
COLOURS = {
    "pass": "green",
    "declined": "yellow",
    "unresolved": "yellow",
    "skipped": "cyan",
    "fail": "red",
    "error": "red",
}


class Watcher(Protocol):
    """Sees the events of a run."""

    def see(self, event: RunEvent) -> None:
        """Show one event."""


class Quiet:
    """Only cases that went wrong, on stderr."""

    def see(self, event: RunEvent) -> None:
        """Show a bad end."""
        if event.line is not None and event.line.outcome in BAD:
            click.echo(sentence(event.line), err=True)


class Json:
    """Each case's line as JSON on stdout."""

    def see(self, event: RunEvent) -> None:
        """Show a case's end."""
        if event.line is not None:
            click.echo(event.line.model_dump_json())


class Plain:
    """One line when a case begins, one when it ends; with cases side by side, each line names its own."""

    def __init__(self) -> None:
        self._running: set[str | None] = set()

    def see(self, event: RunEvent) -> None:
        """Show beginnings, ends and notes."""
        name = f"{short(event.case)}: " if len(self._running) > 1 and event.case else ""
        if event.kind == "case_start":
            self._running.add(event.case)
            click.echo(f"[{event.done + 1}/{event.total}] {short(event.case)}")
        elif event.line is not None:
            self._running.discard(event.case)
            click.echo(f"    {name}{ending(event.line)}")
        elif event.kind in ("child", "note"):
            click.echo(f"    {name}{event.text}")


class Bars:
    """A bar over the cases and one inside the running case; ends scroll by above them."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = Console(highlight=False)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        self._cases = self.progress.add_task("cases", total=None)
        self._case = self.progress.add_task("starting", total=None)

    def see(self, event: RunEvent) -> None:
        """Move the bars, or print an end."""
        from rich.text import Text

        if event.kind == "case_start":
            self.progress.update(self._cases, completed=event.done, total=event.total)
            self.progress.reset(self._case, total=None, description=short(event.case))
        elif event.kind == "progress":
            label = short(event.case) + (f": {event.text}" if event.text else "")
            self.progress.update(self._case, completed=event.done, total=event.total or None, description=label)
        elif event.line is not None:
            self.progress.update(self._cases, completed=event.done, total=event.total)
            line = event.line
            text = Text.assemble((f"{line.outcome:<10} ", COLOURS[line.outcome]), f"{short(line.case)}: {line.reason}")
            self.console.print(text, Text(f"({line.seconds:.1f} s)", style="dim"), soft_wrap=True)
        elif event.kind == "note":
            self.console.print(Text(f"           {event.text}", style="dim"), soft_wrap=True)
        else:
            self.progress.update(self._case, description=event.text)


@contextlib.contextmanager
def watcher(*, as_json: bool, plain: bool, quiet: bool) -> Iterator[Watcher]:
    """The watcher that fits the options and the terminal."""
    if as_json:
        yield Json()
    elif quiet:
        yield Quiet()
    elif plain or not sys.stdout.isatty():
        yield Plain()
    else:
        bars = Bars()
        with bars.progress:
            yield bars


def short(case_id: str | None) -> str:
    """The part of an id after `::`."""
    return (case_id or "").rpartition("::")[2]


def ending(line: CaseLine) -> str:
    """How a case ended, on one line."""
    verdict = f" ({line.verdict})" if line.verdict is not None else ""
    return f"{line.outcome}{verdict}: {line.reason} ({line.seconds:.1f} s)"


def sentence(line: CaseLine) -> str:
    """A case and how it ended, on one line."""
    return f"{line.case}: {line.outcome}: {line.reason}"
