"""`harness env`: the flags that specs may set, and the machine as a record would describe it."""

from __future__ import annotations

import json
import os

import click

from engine.flags import FLAGS, UNSUPPORTED
from harness.cli.common import warn_stray_flags
from harness.spec.resolve import MODELS_VARIABLE, models_root


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def env(as_json: bool) -> None:
    """Print engine flags with their defaults and meaning, and this machine's provenance."""
    from harness.provenance import machine

    warn_stray_flags()
    facts = machine()
    root = models_root()
    models = "not set" if root is None else "set" if root.is_dir() else "set, but no such folder"
    if as_json:
        flags = {
            flag.name: {"default": flag.default, "values": flag.values, "here": os.environ.get(flag.name)}
            for flag in FLAGS.values()
        }
        click.echo(
            json.dumps({"flags": flags, "machine": facts, MODELS_VARIABLE: models}, indent=2, ensure_ascii=False)
        )
        return
    click.echo("Flags (set them in a spec's matrix, never in the shell):")
    for flag in FLAGS.values():
        click.echo(f"  {flag.name}  values {flag.values}, default {flag.default}")
        click.echo(f"      {flag.meaning}; {flag.effect}")
    click.echo(f"Known, but without a counterpart here: {', '.join(sorted(UNSUPPORTED))}")
    click.echo(f"{MODELS_VARIABLE}: {models}")
    click.echo("Machine:")
    for key, value in facts.items():
        click.echo(f"  {key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
