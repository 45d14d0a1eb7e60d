"""`harness list` shows what would run; `harness check` validates. Neither loads a model or looks at a device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
import yaml

from harness.cli.common import select, spec_paths, warn_stray_flags
from harness.spec import Case, LoadedSpec, child_key, load_specs, plan
from harness.spec.resolve import missing_checkpoints, models_root


@click.command("list")
@click.argument("specs", nargs=-1)
@click.option("--only", multiple=True, metavar="ID", help="Only cases whose id is or contains ID (repeatable).")
@click.option("-v", "--verbose", is_flag=True, help="Also every case's fields, defaults filled in.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per case.")
def list_specs(specs: tuple[str, ...], only: tuple[str, ...], verbose: bool, as_json: bool) -> None:
    """List the cases of SPECS (default: specs/*.yaml), in the order they run."""
    warn_stray_flags()
    loaded = load_specs(spec_paths(specs))
    every = [case for spec in loaded for case in plan(spec)]
    wanted = {case.id for case in select(every, only)}
    for spec in loaded:
        cases = [case for case in plan(spec) if case.id in wanted]
        if as_json:
            for case in cases:
                click.echo(json.dumps(case_data(case), ensure_ascii=False))
        elif cases:
            _print(spec, cases, verbose)


def _print(spec: LoadedSpec, cases: list[Case], verbose: bool) -> None:
    children = len({child_key(case.env) for case in cases})
    counts = f"{len(cases)} case{'s' * (len(cases) != 1)}, {children} child process{'es' * (children != 1)}"
    click.echo(f"{spec.id_path}: {spec.spec.title} ({counts})")
    for reason in missing_checkpoints(spec.spec.pair, spec.folder, models_root()):
        click.echo(f"  would skip: {reason}")
    for case in cases:
        notes = [mark for mark in case.marks if mark != "bench"]
        notes += [f"skip: {case.skip}"] * (case.skip is not None)
        notes += [f"xfail: {case.xfail.reason} ({case.xfail.issue})"] if case.xfail else []
        click.echo(f"  {case.id}" + (f"  [{', '.join(notes)}]" if notes else ""))
        if verbose:
            text = yaml.safe_dump(_filled(case), sort_keys=False, allow_unicode=True, width=110)
            click.echo("".join(f"      {row}\n" for row in text.splitlines()), nl=False)


def _filled(case: Case) -> dict[str, Any]:
    """What this case runs with, in the spec's own words; matrix keys are resolved, empty keys left out."""
    data = case.check.model_dump(mode="json", by_alias=True, exclude_none=True)
    data = {key: value for key, value in data.items() if value not in ([], {}) and key != "matrix"}
    data |= {key: value for key, value in case.fields.items() if key not in data}
    if case.env:
        data["env"] = dict(case.env)
    if requires := {k: v for part in case.requires for k, v in part.model_dump(exclude_defaults=True).items()}:
        data["requires"] = requires
    return data


def case_data(case: Case) -> dict[str, Any]:
    """A case as JSON: the same id as in pytest and in the record."""
    return {
        "id": case.id,
        "kind": case.kind,
        "line": case.line,
        "claim": case.claim,
        "cell": dict(case.cell),
        "env": dict(case.env),
        "marks": list(case.marks),
        "skip": case.skip,
        "check": _filled(case),
    }


@click.command()
@click.argument("specs", nargs=-1)
def check(specs: tuple[str, ...]) -> None:
    """Validate SPECS (default: specs/*.yaml); every problem at once as file:line:col, exit 2 if there is one."""
    warn_stray_flags()
    for line in _summaries(load_specs(spec_paths(specs))):
        click.echo(line)


def _summaries(loaded: list[LoadedSpec]) -> Iterator[str]:
    for spec in loaded:
        yield f"{spec.id_path}: ok, {len(spec.spec.checks)} checks, {len(plan(spec))} cases"
