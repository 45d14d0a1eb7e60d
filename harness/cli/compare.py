"""`harness compare`: two records of one spec, and what got worse between them."""

from __future__ import annotations

from pathlib import Path

import click

from harness.errors import UsageError


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--markdown", "as_markdown", is_flag=True, help="Plain markdown, also on a terminal.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with every row.")
@click.option("-v", "--verbose", is_flag=True, help="Also what is the same; every cell on its own row.")
@click.option("--strict", is_flag=True, help="Exit 1 also when a case that held in A has no result in B.")
def compare(a: str, b: str, as_markdown: bool, as_json: bool, verbose: bool, strict: bool) -> int:
    """Compare record B with the baseline A (pages, data folders or record.json files).

    Exit 0 when nothing regressed, 1 when something did, 2 when they cannot be read or share no case.
    """
    import sys

    from harness.record import compare_page as page
    from harness.record.compare import compare as compare_sides
    from harness.record.compare_load import load_side

    if as_markdown and as_json:
        raise UsageError("--markdown and --json exclude each other")
    one, two = load_side(Path(a)), load_side(Path(b))
    if not set(one.names) & set(two.names):
        specs = f"{one.record.spec_name} and {two.record.spec_name}"
        raise UsageError(f"{a} and {b} share no case ({specs}); compare two records of one spec")
    found = compare_sides(one, two)
    if as_json:
        click.echo(page.as_json(found), nl=False)
    elif as_markdown or not sys.stdout.isatty():
        click.echo(page.markdown(found, every=verbose), nl=False)
    else:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(page.markdown(found, every=verbose)))
    return found.exit_code(strict)
