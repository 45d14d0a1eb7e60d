"""Helpers for tests of specs: a valid spec to start from, and folders to put it into."""

from __future__ import annotations

from pathlib import Path

from harness.errors import SpecError
from harness.spec import Case, load_spec, plan

ROOT = Path(__file__).resolve().parent.parent

HEAD = """\
schema: 1
name: tiny
title: A tiny pair
pair:
  target: {path: target}
  drafter: {path: drafter}
checks:
"""
PROBE = "  - {kind: exactness_probe, id: probe}\n"
PARITY = "  - {kind: greedy_parity, id: parity, prompts: [{text: one two}], max_tokens: 8}\n"
MATRIX = """\
  - kind: attribution
    id: attribution
    stages: [base, rowwise]
    matrix:
      multirow: {env: MLXCEL_QMV_MULTIROW, values: [null, "0"]}
      large_d: {env: MLXCEL_SDPA_VECTOR_LARGE_D, values: [null, "0"]}
"""


def write(folder: Path, text: str, name: str = "tiny") -> Path:
    """A spec file in a `specs` folder of a small repository."""
    (folder / "specs").mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").touch()
    path = folder / "specs" / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def cases_of(folder: Path, checks: str) -> tuple[Case, ...]:
    """The cases of a spec with these checks."""
    return plan(load_spec(write(folder, HEAD + checks)))


def problems_of(folder: Path, text: str, name: str = "tiny") -> list[str]:
    """`line:col: message` of every problem of a spec; empty when it loads."""
    try:
        load_spec(write(folder, text, name))
    except SpecError as error:
        return [f"{problem.line}:{problem.col}: {problem.message}" for problem in error.problems]
    return []


def check_problems(folder: Path, checks: str) -> list[str]:
    """Problems of a spec that is valid but for its checks, lines counted from the first check's line."""
    found = problems_of(folder, HEAD + checks)
    lines = HEAD.count("\n")
    return [f"{int(text.split(':', 1)[0]) - lines}:{text.split(':', 1)[1]}" for text in found]
