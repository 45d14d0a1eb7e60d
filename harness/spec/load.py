"""A path -> a spec that holds together, or one SpecError with every problem at its place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from harness.errors import Problem, SpecError
from harness.spec import rules
from harness.spec.model import Spec
from harness.spec.resolve import find_checkpoint
from harness.spec.wording import problems_of
from harness.spec.yaml12 import read_document

_ROOT_MARKS = ("pyproject.toml", ".git")


@dataclass(frozen=True)
class LoadedSpec:
    """A valid spec with where it came from; `id_path` is its place in the repository, as ids show it."""

    spec: Spec
    path: Path
    id_path: str
    text: str
    sha256: str
    check_lines: tuple[int, ...]
    local_pair: bool  # both checkpoints lie beside the spec

    @property
    def folder(self) -> Path:
        """Folder that the spec's relative paths start from."""
        return self.path.parent


def id_path(path: Path) -> str:
    """The path as ids show it: relative to the repository around it, else to the working folder."""
    full = path.absolute()
    for parent in full.parents:
        if any((parent / mark).exists() for mark in _ROOT_MARKS):
            return full.relative_to(parent).as_posix()
    here = Path.cwd()
    return full.relative_to(here).as_posix() if full.is_relative_to(here) else path.name


def load_spec(path: Path | str, *, shown: str | None = None) -> LoadedSpec:
    """Load and validate one spec; `shown` replaces its name in messages. Raises SpecError."""
    path = Path(path)
    name = shown or (id_path(path) if path.is_absolute() else path.as_posix())
    document = read_document(path, name)
    spec: Spec | None = None
    problems: list[Problem] = []
    try:
        spec = Spec.model_validate(document.value)
    except ValidationError as error:
        problems = problems_of(error, document)
    problems += rules.problems(document, path.absolute())
    if problems or spec is None:
        raise SpecError(problems)
    folder = path.absolute().parent
    refs = (spec.pair.target, spec.pair.drafter) if spec.pair is not None else ()
    return LoadedSpec(
        spec=spec,
        path=path.absolute(),
        id_path=id_path(path),
        text=document.text,
        sha256=hashlib.sha256(document.text.encode()).hexdigest(),
        check_lines=tuple(document.line(("checks", index)) for index in range(len(spec.checks))),
        local_pair=all(find_checkpoint(ref.path, folder, None) for ref in refs),
    )


def load_specs(paths: Iterable[Path | str]) -> list[LoadedSpec]:
    """Load several; one SpecError carries the problems of all."""
    loaded: list[LoadedSpec] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            loaded.append(load_spec(path))
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return loaded
