"""`harness schema`: write what is generated from the spec models, or refuse drift."""

from __future__ import annotations

from pathlib import Path

import click

from harness.cli.common import SPECS_FOLDER
from harness.errors import UsageError


@click.command()
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit 1 if a file is out of date.")
@click.option("--print", "only_print", is_flag=True, help="Print the JSON schema and write nothing.")
@click.option("--dir", "folder", default=str(SPECS_FOLDER), show_default=True, help="Folder of the generated files.")
def schema(only_check: bool, only_print: bool, folder: str) -> int:
    """Write spec.schema.json and the table of keys in specs/README.md."""
    from harness.spec import schema as generator

    if only_print:
        click.echo(generator.json_schema(), nl=False)
        return 0
    root = Path(folder)
    if not root.is_dir():
        raise UsageError(f"no folder {root.as_posix()}; run this at the top of the repository")
    stale = generator.drift(root)
    if only_check:
        for path in stale:
            click.echo(f"{path.as_posix()} is out of date; run `harness schema`", err=True)
        return 1 if stale else 0
    texts = generator.generated_files(root)
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
        click.echo(f"wrote {path.as_posix()}")
    if not stale:
        click.echo("up to date")
    return 0
