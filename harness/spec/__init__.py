"""YAML text -> `Spec` -> `Case`s: `plan(load_spec(path))`. Pure apart from reading the spec's own files."""

from harness.spec.load import LoadedSpec, load_spec, load_specs
from harness.spec.plan import Case, child_key, plan

__all__ = ["Case", "LoadedSpec", "child_key", "load_spec", "load_specs", "plan"]
