"""Cases: ids, cells, flags, filled-in defaults. And what is generated from the models."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support_spec import HEAD, MATRIX, PARITY, PROBE, ROOT, cases_of, write

from harness.spec import child_key, load_spec, plan, schema
from harness.spec import model as m
from harness.spec.load import id_path
from harness.spec.matrix import cell_name, expand
from harness.spec.resolve import find_checkpoint, missing_checkpoints, prompt_text

ID = re.compile(r"specs/[a-z0-9_]+\.yaml::[a-z0-9][a-z0-9_.-]*(\[[A-Za-z0-9_.:+-]+\])?")


def test_cells_come_in_declaration_order_stage_first(tmp_path: Path) -> None:
    """Another order would pair a result with another cell's id."""
    names = [case.name for case in cases_of(tmp_path, MATRIX)]
    expected = [
        f"attribution[stage:{stage}+multirow:{row}+large_d:{large}]"
        for stage, row, large in itertools.product(("base", "rowwise"), ("unset", "0"), ("unset", "0"))
    ]
    assert names == expected


def test_exclude_drops_and_include_appends(tmp_path: Path) -> None:
    """Partial match drops; an included cell comes last."""
    text = MATRIX + '    exclude: [{stage: base}, {multirow: "0", large_d: null}]\n'
    text += '    include: [{stage: base, multirow: "1", large_d: null}]\n    expect_cells: 4\n'
    assert [case.name for case in cases_of(tmp_path, text)] == [
        "attribution[stage:rowwise+multirow:unset+large_d:unset]",
        "attribution[stage:rowwise+multirow:unset+large_d:0]",
        "attribution[stage:rowwise+multirow:0+large_d:0]",
        "attribution[stage:base+multirow:1+large_d:unset]",
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-c]", fullmatch=True), st.lists(st.sampled_from([2, 4, 8]), unique=True), max_size=3
    )
)
def test_expansion_is_the_product(axes: dict[str, list[int]]) -> None:
    """Property: every combination once, and an empty axis is a finding, never silence."""
    fields = {"a": "block_size", "b": "draws", "c": "seed"}
    matrix = {name: m.FieldAxis(field=fields[name], values=tuple(values)) for name, values in axes.items()}
    check = m.Attribution(kind="attribution", id="x", matrix=matrix, stages=("base",))
    found = expand(check)
    assert [dict(cell) for cell in found.cells] == [
        {"stage": "base", **dict(zip(axes, values, strict=True))} for values in itertools.product(*axes.values())
    ]
    assert len({cell_name(cell) for cell in found.cells}) == len(found.cells)
    assert bool(found.findings) == any(not values for values in axes.values())


def test_null_means_not_set_and_shares_the_default_child(tmp_path: Path) -> None:
    """A flag set to an empty string is not the same as no flag."""
    probe, first, *_, last = cases_of(tmp_path, PROBE + MATRIX)
    assert first.env == {"MLXCEL_QMV_MULTIROW": None, "MLXCEL_SDPA_VECTOR_LARGE_D": None}
    assert first.child_env == {}
    assert child_key(first.env) == child_key(probe.env) == ()
    assert last.child_env == {"MLXCEL_QMV_MULTIROW": "0", "MLXCEL_SDPA_VECTOR_LARGE_D": "0"}


def test_declined_is_declared_outside_must_pass_only(tmp_path: Path) -> None:
    """A rowwise stage that declines must fail the run; the base stage is the picture asked for."""
    text = MATRIX + "  - {kind: decline, id: no, expect_reason: x, prompts: [{text: a}]}\n" + PROBE
    declared = {case.name.partition("+")[0]: case.declared_decline for case in cases_of(tmp_path, text)}
    assert declared == {"attribution[stage:base": True, "attribution[stage:rowwise": False, "no": True, "probe": False}


def test_field_axis_changes_the_check_of_its_case(tmp_path: Path) -> None:
    """The id would say one number and the check use another."""
    text = PARITY.replace("max_tokens: 8", "max_tokens: 8, matrix: {n: {field: max_tokens, values: [4, 6]}}")
    found = [(case.name, case.check.max_tokens) for case in cases_of(tmp_path, text)]  # type: ignore[union-attr]
    assert found == [("parity[n:4]", 4), ("parity[n:6]", 6)]


def test_defaults_are_written_into_the_case(tmp_path: Path) -> None:
    """A runner must not have to know the pair's block size or another check's prompts."""
    text = PROBE + PARITY.replace("{text: one two}", "{text: one two}, {text: b, name: second}")
    text += "  - {kind: throughput, id: t, arms: [{name: mtp}], repeats: 1, max_tokens: 9}\n"
    probe, parity, speed = (case.check for case in cases_of(tmp_path, text))
    assert isinstance(probe, m.ExactnessProbe)
    assert isinstance(parity, m.GreedyParity)
    assert isinstance(speed, m.Throughput)
    assert (probe.block_sizes, parity.block_sizes, speed.arms[0].block_size) == ((4,), (4,), 4)
    assert [prompt.name for prompt in speed.prompts or ()] == ["text1", "second"]


def test_marks_follow_kind_and_requirements(tmp_path: Path) -> None:
    """A timing in the short run would make it long."""
    text = PARITY + "  - {kind: throughput, id: t, arms: [{name: mtp}], repeats: 1, max_tokens: 9}\n"
    text += "  - {kind: exactness_probe, id: p, requires: {cuda: true}, slow: true}\n"
    assert [case.marks for case in cases_of(tmp_path, text)] == [
        ("weights",),
        ("slow", "bench", "weights"),
        ("gpu", "slow", "weights"),
    ]
    for name in ("target", "drafter"):
        (tmp_path / "specs" / name).mkdir()
    assert cases_of(tmp_path, PARITY)[0].marks == ()


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("gemma4_nano", 16),
        ("gemma4_12b", 16),
        ("gemma4_31b", 16),
        ("qwen35_4b_dflash", 12),
        ("qwen35_4b_seeded", 12),
        ("qwen35_nano", 12),
    ],
)
def test_ids_survive_pytest_k(name: str, cells: int) -> None:
    """`=`, `,` and blanks are operators or separators in a -k word."""
    cases = plan(load_spec(ROOT / "specs" / f"{name}.yaml"))
    assert len({case.id for case in cases}) == len(cases)
    assert [case.id for case in cases if not ID.fullmatch(case.id)] == []
    assert sum(case.kind == "attribution" for case in cases) == cells


def test_id_does_not_depend_on_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An id that changes with the working folder cannot be resumed or compared."""
    path = write(tmp_path, HEAD + PROBE)
    before = plan(load_spec(path))[0].id
    monkeypatch.chdir(tmp_path / "specs")
    assert plan(load_spec("tiny.yaml"))[0].id == before == "specs/tiny.yaml::probe"
    assert id_path(Path("tiny.yaml")) == "specs/tiny.yaml"


def test_checkpoints_are_found_beside_the_spec_first(tmp_path: Path) -> None:
    """A models folder must not shadow a committed checkpoint."""
    folder, root = tmp_path / "specs", tmp_path / "models"
    (root / "target").mkdir(parents=True)
    assert find_checkpoint("target", folder, root) == root / "target"
    (folder / "target").mkdir(parents=True)
    assert find_checkpoint("target", folder, root) == folder / "target"
    assert find_checkpoint("target", folder, None) == folder / "target"
    assert find_checkpoint("drafter", folder, root) is None


def test_missing_checkpoint_reason_names_it_and_what_could_be_done(tmp_path: Path) -> None:
    """A skip without the name of what is missing helps nobody."""
    pair = load_spec(ROOT / "specs" / "gemma4_12b.yaml").spec.pair
    unset, elsewhere = (missing_checkpoints(pair, tmp_path, root)[0] for root in (None, tmp_path / "no"))
    assert unset.startswith("needs checkpoint gemma-4-12b-it-4bit beside the spec or under $HARNESS_MODELS (not set)")
    assert "grown to 12b geometry" in unset
    assert "(that folder does not exist)" in elsewhere


def test_prompt_text_is_exactly_the_file(tmp_path: Path) -> None:
    """Stripping or newline translation would change the tokens and so the prompt's hash."""
    data = "  a\r\nb \n\n"
    (tmp_path / "p.txt").write_bytes(data.encode())
    assert prompt_text(m.Prompt(file="p.txt"), tmp_path) == data


# ---- generated files ---------------------------------------------------------------------------------------------


def test_generated_files_are_up_to_date() -> None:
    """`harness schema` was not run after a change of the models."""
    assert schema.drift(ROOT / "specs") == []


def test_drift_is_seen_and_hand_written_text_survives(tmp_path: Path) -> None:
    """A rewritten README must keep what a person wrote."""
    (tmp_path / "README.md").write_text(f"# Mine\n\n{schema.BEGIN}\nold\n{schema.END}\n\nafter\n")
    for path, text in schema.generated_files(tmp_path).items():
        path.write_text(text)
    assert schema.drift(tmp_path) == []
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# Mine\n")
    assert text.endswith("\n\nafter\n")
    (tmp_path / "README.md").write_text(text.replace("| `name` | text |", "| `name` | number |", 1))
    assert schema.drift(tmp_path) == [tmp_path / "README.md"]
    (tmp_path / "spec.schema.json").unlink()
    assert len(schema.drift(tmp_path)) == 2


def test_every_key_has_a_description() -> None:
    """An undocumented key has an empty row in the table and no hover text."""
    rows = [row for row in schema.keys_markdown().splitlines() if row.startswith("| `")]
    assert len(rows) > 70
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize(
    "name", ["gemma4_nano", "gemma4_12b", "gemma4_31b", "qwen35_4b_dflash", "qwen35_4b_seeded", "qwen35_nano"]
)
def test_committed_specs_fit_the_json_schema(name: str) -> None:
    """Editors and pre-commit judge by the schema, the harness by the models: both must agree."""
    validator = jsonschema.Draft202012Validator(json.loads(schema.json_schema()))
    data = yaml.safe_load((ROOT / "specs" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert list(validator.iter_errors(data)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("title:", "titel:"),
        ('"0"', "0"),
        ("kind: attribution", "kind: atribution"),
        ("[base, rowwise]", "[base, rowise]"),
        ("MLXCEL_QMV_MULTIROW,", "MLXCEL_QMV,"),
    ],
)
def test_the_json_schema_refuses_what_the_loader_refuses(old: str, new: str) -> None:
    """An editor that accepts a typo is worse than none."""
    validator = jsonschema.Draft202012Validator(json.loads(schema.json_schema()))
    good = HEAD + PROBE + MATRIX
    assert list(validator.iter_errors(yaml.safe_load(good))) == []
    assert list(validator.iter_errors(yaml.safe_load(good.replace(old, new)))) != []
