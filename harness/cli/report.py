"""`harness report`: render records again from their raw lines, or refuse a page that says something else."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("records", nargs=-1)
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit 1 for every figure that differs.")
@click.option("--out", default=None, help="Folder of records, when none is named. [default: docs/benchmark_results]")
def report(records: tuple[str, ...], only_check: bool, out: str | None) -> int:
    """Render RECORDS (pages or data folders; default: all) from runs.jsonl; prose outside the blocks stays."""
    from harness.record import report as reports
    from harness.record.store import DEFAULT_OUT

    folder = Path(out) if out is not None else DEFAULT_OUT
    paths = [Path(record) for record in records]
    if only_check:
        problems = [line for path in paths for line in reports.check(path)] if paths else reports.check_all(folder)
        for line in problems:
            click.echo(line, err=True)
        if not problems:
            click.echo(f"{len(paths) or len(reports.records_in(folder))} records say what their raw lines say")
        return 1 if problems else 0
    pages = [reports.regenerate(path) for path in paths] if paths else reports.regenerate_all(folder)
    for page in pages:
        click.echo(f"wrote {page.as_posix()}")
    if not pages:
        click.echo(f"no records in {folder.as_posix()}")
    return 0
