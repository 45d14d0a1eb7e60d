"""`harness counters`: drafting counters of other engines in our terms, and whether they add up."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("files", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per source, a line each.")
def counters(files: tuple[str, ...], as_json: bool) -> int:
    """Read drafting metrics of vLLM, SGLang or llama.cpp (Prometheus text, log, JSON) or a runs.jsonl of ours.

    Prints acceptance rate, acceptance length (bonus included) and acceptance by position, and names every identity
    that the counts break. Exit 0 when all hold, 1 when one is broken, 2 when a file cannot be read.
    """
    from harness.counters import violations
    from harness.counters_view import as_json_lines, as_table
    from harness.metrics import read_counters

    found = [one for name in files for one in read_counters(Path(name))]
    broken = [(one, violation) for one in found for violation in violations(one)]
    click.echo(as_json_lines(found) if as_json else as_table(found))
    if not as_json:
        for one, violation in broken:
            click.echo(f"violated: {one.source}: {violation}")
        sources = f"{len(found)} source{'' if len(found) == 1 else 's'}"
        found_broken = "1 identity" if len(broken) == 1 else f"{len(broken)} identities"
        click.echo(f"{sources}: {found_broken} violated" if broken else f"{sources}: every identity holds")
    return 1 if broken else 0
