"""`harness new NAME`: a small spec that is valid as it stands, to be edited."""

from __future__ import annotations

import re
from pathlib import Path

import click

from harness.cli.common import SPECS_FOLDER
from harness.errors import SpecError, UsageError
from harness.spec import load_spec

_TEMPLATE = """\
# yaml-language-server: $schema={schema}
# Every key is described in specs/README.md; `harness check {path}` validates, `harness list -v {path}` shows the cases.
schema: 1
name: {name}
title: {title}

pair:
  target: {{path: {target}}}
  drafter: {{path: {drafter}}}
  block_size: 4

checks:
  # Block equals chain, byte for byte; the long draw wraps the sliding window.
  - {{kind: exactness_probe, id: probe, draws: [8, 8, 8, 1056]}}

  # MTP's text against classic decode's. Acceptance is each prompt's own, so take several kinds.
  # lint: allow horizon: short prompts to start with; add a prompt nearly as long as the window
  - kind: greedy_parity
    id: parity
    prompts:
      - {{text: "Write a function that retries a call with a growing pause.", form: chat, name: code}}
      - {{text: "Why does the sea look blue on some days and grey on others?", form: chat, name: prose}}
      - {{text: "List ten things to check before a release.", form: chat, name: list}}
    max_tokens: 128
    ignore_stop: true
    block_sizes: [2, 4, 8]

  # Speed, between classic brackets; slow, so left out of the short test run.
  - kind: throughput
    id: decode
    arms: [{{name: mtp, block_size: 4}}]
    repeats: 3
    max_tokens: 128
    ignore_stop: true
"""


@click.command()
@click.argument("name")
@click.option("--target", default="checkpoints/gemma4-nano-it-4bit", show_default=True, help="Target checkpoint.")
@click.option(
    "--drafter", default="checkpoints/gemma4-nano-it-assistant-4bit", show_default=True, help="Drafter checkpoint."
)
@click.option("--dir", "folder", default=str(SPECS_FOLDER), show_default=True, help="Folder to write into.")
def new(name: str, target: str, drafter: str, folder: str) -> None:
    """Write NAME.yaml, a valid spec to start from."""
    stem = name.removesuffix(".yaml")
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", stem):
        raise UsageError(f"'{name}' is no spec name; use lower case letters, digits and _ . -, e.g. my_pair")
    root = Path(folder)
    path = root / f"{stem}.yaml"
    if not root.is_dir():
        raise UsageError(f"no folder {root.as_posix()}; make it, or name one with --dir")
    for option, value in (("--target", target), ("--drafter", drafter)):
        if not re.fullmatch(r"[A-Za-z0-9_./@+-]+", value):
            raise UsageError(f"{option} '{value}': name a folder with letters, digits and _ . / @ + - only")
    schema = "spec.schema.json" if (root / "spec.schema.json").exists() else f"{SPECS_FOLDER}/spec.schema.json"
    text = _TEMPLATE.format(
        schema=schema,
        path=path.as_posix(),
        name=stem,
        title=f"{stem.replace('_', ' ')} pair",
        target=target,
        drafter=drafter,
    )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path.as_posix()} is there already; choose another name") from None
    try:
        load_spec(path)
    except SpecError:
        path.unlink()
        raise
    click.echo(f"wrote {path.as_posix()}; next: `harness list -v {path.as_posix()}`")
