"""`harness list` shows what would run, or what ran; `harness check` validates. Neither loads a model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import click
import yaml

from harness.cli.common import SPECS_FOLDER, select, spec_paths, warn_stray_flags
from harness.errors import UsageError
from harness.spec import Case, LoadedSpec, child_key, load_specs, plan
from harness.spec.resolve import growable, missing_checkpoints, models_root


@click.command("list")
@click.argument("specs", nargs=-1)
@click.option("--only", multiple=True, metavar="ID", help="Only cases whose id is or contains ID (repeatable).")
@click.option("-v", "--verbose", is_flag=True, help="Also every case's fields, defaults filled in.")
@click.option("--history", "past", is_flag=True, help="The records of SPECS instead, newest first.")
@click.option("--out", default=None, help="With --history: folder of records. [default: docs/benchmark_results]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per case (or per record).")
def list_specs(
    specs: tuple[str, ...], only: tuple[str, ...], verbose: bool, past: bool, out: str | None, as_json: bool
) -> None:
    """List the cases of SPECS (default: specs/*.yaml), in the order they run."""
    if past:
        if only or verbose:
            raise UsageError("--history lists records; --only and --verbose are about cases")
        _history(specs, out, as_json)
        return
    if out is not None:
        raise UsageError("--out names a folder of records; it goes with --history")
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


def _history(specs: tuple[str, ...], out: str | None, as_json: bool) -> None:
    """Records by spec; a spec is named by its path or its name, and need not exist any more."""
    from harness.record.history import history, history_rows, history_table
    from harness.record.store import DEFAULT_OUT

    folder = Path(out) if out is not None else DEFAULT_OUT
    if not folder.is_dir():
        raise UsageError(f"no folder {folder.as_posix()}; name one with --out")
    for given in specs or (None,):
        name = Path(given).name.removesuffix(".yaml") if given is not None else None
        places = (Path(given), SPECS_FOLDER / f"{name}.yaml") if given is not None else ()
        text = next((place.read_bytes() for place in places if place.is_file()), None)
        digest = hashlib.sha256(text).hexdigest() if text is not None else None
        rows = history_rows(history(folder, name), digest)
        if as_json:
            for row in rows:
                click.echo(json.dumps({"spec_name": name, **row} if name else row, ensure_ascii=False))
        elif rows:
            click.echo((f"{name}: " if name else "") + f"{len(rows)} record{'s' * (len(rows) != 1)}")
            click.echo(history_table(rows))
        else:
            click.echo(f"no records of {name or 'any spec'} in {folder.as_posix()}")


def _print(spec: LoadedSpec, cases: list[Case], verbose: bool) -> None:
    children = len({child_key(case.env) for case in cases})
    counts = f"{len(cases)} case{'s' * (len(cases) != 1)}, {children} child process{'es' * (children != 1)}"
    click.echo(f"{spec.id_path}: {spec.spec.title} ({counts})")
    state = "not here" if growable(spec.spec.pair, spec.folder, models_root()) else "would skip"
    for reason in missing_checkpoints(spec.spec.pair, spec.folder, models_root()):
        click.echo(f"  {state}: {reason}")
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
@click.option("--strict", is_flag=True, help="Exit 2 for a warning too.")
def check(specs: tuple[str, ...], strict: bool) -> int:
    """Validate SPECS (default: specs/*.yaml); every problem at once as file:line:col, exit 2 if there is one.

    Valid specs are read once more for what a reviewer would object to: warnings on stderr, which change no exit code
    without --strict. `# lint: allow RULE: why` in the spec answers one.
    """
    from harness.spec.lint import lint

    warn_stray_flags()
    found = 0
    for spec in load_specs(spec_paths(specs)):
        warnings = lint(spec, models_root())
        for warning in warnings:
            click.echo(str(warning), err=True)
        click.echo(_summary(spec, len(warnings)))
        found += len(warnings)
    return UsageError.exit_code if strict and found else 0


def _summary(spec: LoadedSpec, warnings: int) -> str:
    said = f", {warnings} warning{'s' * (warnings != 1)}" if warnings else ""
    return f"{spec.id_path}: ok, {len(spec.spec.checks)} checks, {len(plan(spec))} cases{said}"
