"""Loading specs: each mistake is one line with the right place, and all come at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_spec import HEAD, MATRIX, PARITY, PROBE, ROOT, check_problems, problems_of, write

from harness.errors import Problem, SpecError
from harness.spec import load_spec, load_specs
from harness.spec.model import CHECK_MODELS


def one(found: list[str]) -> str:
    """The only problem."""
    assert len(found) == 1, found
    return found[0]


def test_a_valid_spec_loads(tmp_path: Path) -> None:
    """The base of every other test here."""
    loaded = load_spec(write(tmp_path, HEAD + PROBE + PARITY + MATRIX))
    assert loaded.id_path == "specs/tiny.yaml"
    assert loaded.check_lines == (8, 9, 10)
    assert [check.id for check in loaded.spec.checks] == ["probe", "parity", "attribution"]
    assert loaded.spec.pair.block_size == 4


def test_unknown_key_has_a_suggestion_and_its_own_place(tmp_path: Path) -> None:
    """Pydantic says "Extra inputs are not permitted" and points at the value."""
    text = HEAD.replace("title:", "titel:") + PROBE
    found = problems_of(tmp_path, text)
    assert "3:1: unknown key 'titel'; did you mean 'title'?" in found
    assert "1:1: missing key 'title'" in found
    assert one(check_problems(tmp_path, "  - {kind: exactness_probe, id: p, drawz: [8]}\n")) == (
        "1:36: unknown key 'drawz'; did you mean 'draws'?"
    )


def test_unknown_key_deep_inside_lists_what_is_known(tmp_path: Path) -> None:
    """Without a near word the known keys must be listed."""
    text = PARITY.replace("{text: one two}", "{text: a, qqqq: b}")
    assert one(check_problems(tmp_path, text)).endswith("unknown key 'qqqq'; known keys: file, form, name, text")


def test_duplicate_key(tmp_path: Path) -> None:
    """The last one used to win silently."""
    assert one(problems_of(tmp_path, HEAD.replace("title:", "name: other\ntitle:") + PROBE)) == (
        "3:1: duplicate key 'name' (first at line 2)"
    )


def test_unknown_kind_lists_known_kinds(tmp_path: Path) -> None:
    """A union error would have listed every model."""
    found = one(check_problems(tmp_path, "  - {kind: througput, id: k}\n"))
    known = ", ".join(CHECK_MODELS)
    assert "rollback" in known
    assert found == f"1:12: unknown check kind 'througput'; did you mean 'throughput'?; known kinds: {known}"
    assert "missing key 'kind'" in one(check_problems(tmp_path, "  - {id: k}\n"))


@pytest.mark.parametrize(("value", "shown"), [("0", '"0"'), ("false", '"false"'), ("1.5", '"1.5"')])
def test_unquoted_environment_value_says_quote_it(tmp_path: Path, value: str, shown: str) -> None:
    """`0` and `false` would reach the child as other text than was written."""
    text = MATRIX.replace('values: [null, "0"]}\n      large_d', f"values: [null, {value}]}}\n      large_d")
    found = one(check_problems(tmp_path, text))
    assert found.startswith("5:")
    assert found.endswith(f"quote it: {shown}")
    arm = "  - {kind: throughput, id: t, prompts: [{text: a}], repeats: 1, max_tokens: 9,"
    arm += " arms: [{name: a, env: {MLX_ENABLE_TF32: 0}}]}\n"
    assert one(check_problems(tmp_path, arm)).endswith('quote it: "0"')


def test_unknown_flag_has_a_suggestion(tmp_path: Path) -> None:
    """A typo in a flag's name measures the default and calls it something else."""
    found = one(check_problems(tmp_path, MATRIX.replace("MLXCEL_QMV_MULTIROW,", "MLXCEL_QMV_MULTIROWS,")))
    assert found == "5:23: unknown flag MLXCEL_QMV_MULTIROWS; did you mean MLXCEL_QMV_MULTIROW?"


def test_flag_without_counterpart_gives_the_reason(tmp_path: Path) -> None:
    """A known flag of the reference system that does nothing here must not be ignored."""
    found = one(check_problems(tmp_path, MATRIX.replace("MLXCEL_QMV_MULTIROW,", "MLX_CUDA_USE_CUDNN_SDPA,")))
    assert found.startswith("5:23: MLX_CUDA_USE_CUDNN_SDPA has no counterpart here: ")


def test_flag_value_that_the_engine_cannot_read(tmp_path: Path) -> None:
    """It would only be seen when the child starts."""
    found = one(check_problems(tmp_path, MATRIX.replace('large_d: {env: MLXCEL_SDPA_VECTOR_LARGE_D, values: [null, "0"]}', 'large_d: {env: MLXCEL_SDPA_VECTOR_LARGE_D, values: [null, "maybe"]}')))  # fmt: skip  # noqa: E501
    assert found.startswith("6:65: MLXCEL_SDPA_VECTOR_LARGE_D='maybe'")


def test_matrix_with_zero_cells(tmp_path: Path) -> None:
    """An empty matrix once ran nothing and was green."""
    empty = MATRIX.replace('values: [null, "0"]}\n      large_d', "values: []}\n      large_d")
    assert one(check_problems(tmp_path, empty)) == "5:52: matrix expands to 0 cells"
    assert one(check_problems(tmp_path, MATRIX.replace("[base, rowwise]", "[]") + "    must_pass: []\n")) == (
        "3:13: matrix expands to 0 cells"
    )
    excluded = MATRIX + "    exclude: [{stage: base}, {stage: rowwise}]\n"
    assert one(check_problems(tmp_path, excluded)).endswith("matrix expands to 0 cells")


def test_duplicate_cells(tmp_path: Path) -> None:
    """Two cells with one id would overwrite each other's result."""
    twice = MATRIX.replace('values: [null, "0"]}\n      large_d', 'values: [null, "0", "0"]}\n      large_d')
    assert one(check_problems(tmp_path, twice)) == "5:64: duplicate cell: the value '0' is already in axis 'multirow'"
    null = MATRIX.replace('values: [null, "0"]}\n      large_d', "values: [null, unset]}\n      large_d")
    assert any("duplicate cell: the value 'unset'" in text for text in check_problems(tmp_path, null))
    included = MATRIX + '    include: [{stage: base, multirow: "0", large_d: null}]\n'
    assert one(check_problems(tmp_path, included)).endswith("duplicate cell [stage:base+multirow:0+large_d:unset]")


def test_duplicate_ids(tmp_path: Path) -> None:
    """pytest does not refuse two items with one id."""
    assert one(check_problems(tmp_path, PROBE + PROBE)) == "2:33: duplicate check id 'probe' (first at line 8)"


def test_too_many_cells(tmp_path: Path) -> None:
    """65 cells are an accident, not a question."""
    values = ", ".join(f'"{number}"' for number in range(33))
    text = MATRIX.replace('values: [null, "0"]}\n      large_d', f"values: [{values}]}}\n      large_d")
    text = text.replace("MLXCEL_QMV_MULTIROW,", "MLXCEL_PREFILL_CHUNK,")
    assert one(check_problems(tmp_path, text)) == "4:13: matrix expands to 132 cells; a check has at most 64".replace(
        "4:13", "5:7"
    )


def test_exclude_that_matches_nothing(tmp_path: Path) -> None:
    """`multirow: 0` is not `multirow: "0"`, and would have excluded nothing."""
    found = one(check_problems(tmp_path, MATRIX + "    exclude: [{multirow: 0}]\n"))
    assert found == "7:15: exclude matches no cell; write values as the axes have them"
    assert "exclude names no axis: row" in one(check_problems(tmp_path, MATRIX + "    exclude: [{row: base}]\n"))


def test_include_must_be_complete(tmp_path: Path) -> None:
    """A half cell that extends others is easily misread."""
    found = one(check_problems(tmp_path, MATRIX + "    include: [{stage: base}]\n"))
    assert found.endswith("include takes complete cells, a value for every axis: missing multirow, large_d")


def test_expect_cells_pins_the_count(tmp_path: Path) -> None:
    """A filter that drops too much must show."""
    found = one(check_problems(tmp_path, MATRIX + "    expect_cells: 9\n"))
    assert found == "7:19: expect_cells is 9, but the matrix has 8 cells"


def test_name_is_the_stem_and_begins_no_other(tmp_path: Path) -> None:
    """`pytest -k tiny` would also run tiny_long."""
    assert one(problems_of(tmp_path, HEAD.replace("name: tiny", "name: other") + PROBE)) == (
        "2:7: name 'other' is not the file's stem 'tiny'"
    )
    (tmp_path / "specs" / "tiny_long.yaml").touch()
    found = one(problems_of(tmp_path, HEAD + PROBE))
    assert found.startswith("2:7: name 'tiny' begins the name of tiny_long.yaml")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ('{text: ""}', "the prompt is empty"),
        ('{text: "  "}', "the prompt is empty"),
        ("{}", "a prompt has exactly one of `file` and `text`"),
        ("{text: a, file: b.txt}", "a prompt has exactly one of `file` and `text`"),
        ("{file: missing.txt}", "prompt file 'missing.txt' is not in the spec's folder"),
        ("{file: empty.txt}", "prompt file 'empty.txt' is empty"),
        ("{file: latin.txt}", "prompt file 'latin.txt' is not UTF-8 (byte 1)"),
        ("{file: ../outside.txt}", "'../outside.txt' leads out of the spec's folder"),
        ("{file: /etc/hostname}", "'/etc/hostname' is not relative; name it relative to the spec's folder"),
        ("{file: link.txt}", "'link.txt' leads out of the spec's folder"),
        ("{file: folder}", "cannot read prompt file 'folder': Is a directory"),
    ],
)
def test_bad_prompts(tmp_path: Path, prompt: str, message: str) -> None:
    """An empty or foreign prompt would be measured as if it were meant."""
    specs = tmp_path / "specs"
    (specs / "folder").mkdir(parents=True)
    (specs / "empty.txt").write_text(" \n")
    (specs / "latin.txt").write_bytes(b"a\xe9")
    (tmp_path / "outside.txt").write_text("secret")
    (specs / "link.txt").symlink_to(tmp_path / "outside.txt")
    found = one(check_problems(tmp_path, PARITY.replace("{text: one two}", prompt)))
    assert found.partition(": ")[2] == message


def test_two_prompts_of_one_name(tmp_path: Path) -> None:
    """Their rows in a table could not be told apart."""
    text = PARITY.replace("{text: one two}", "{text: a, name: x}, {text: b, name: x}")
    assert "prompt 1 is called 'x' too" in one(check_problems(tmp_path, text))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("temperature: 0.7", "temperature 0.7 is refused: greedy decoding only (0), sampled text has no one answer"),
        ("batch: 4", "batch 4 is refused: one sequence at a time (1)"),
        ("block_sizes: [2, 2]", "2 is listed twice"),
        ("block_sizes: [2], min_acceptance: 0.5", "is judged at the pair's block size 4, which block_sizes leaves out"),
        ("min_distinct_tokens: 9", "9 is more than max_tokens 8"),
        ("block_sizes: [9]", "checks[0].block_sizes[0]: must be at most 8, found the number 9"),
        ("block_sizes: []", "checks[0].block_sizes: must not be empty"),
        ("min_acceptance: 1.5", "checks[0].min_acceptance: must be at most 1, found the number 1.5"),
        ("skip: ''", "checks[0].skip: shorter than 3"),
        ("xfail: {reason: known}", "missing key 'issue' in checks[0].xfail"),
        (
            "requires: {compute_capability: '9'}",
            """checks[0].requires.compute_capability: '9' does not fit; write a version like ">=9.0\"""",
        ),
        ("slow: 1", "checks[0].slow: expected true or false, found the number 1"),
        ("matrix: []", "checks[0].matrix: expected keys and values, found a list"),
    ],
)
def test_bad_fields_of_a_check(tmp_path: Path, extra: str, message: str) -> None:
    """Each says what was found and what is possible."""
    found = one(check_problems(tmp_path, PARITY.replace("max_tokens: 8", f"max_tokens: 8, {extra}")))
    assert found.split(": ", 1)[1] == message


def test_field_axis_sets_only_fields_of_the_kind(tmp_path: Path) -> None:
    """An axis over a misspelt field would run the same case several times."""
    text = PARITY.replace("max_tokens: 8", "max_tokens: 8, matrix: {n: {field: max_token, values: [4, 8]}}")
    assert "greedy_parity has no field 'max_token' that an axis can set; did you mean 'max_tokens'?" in one(
        check_problems(tmp_path, text)
    )
    text = PARITY.replace("max_tokens: 8", "max_tokens: 8, matrix: {n: {field: max_tokens, values: [4, x]}}")
    assert one(check_problems(tmp_path, text)).endswith("'x' is no value for `max_tokens`")


def test_must_pass_names_a_stage_of_the_check(tmp_path: Path) -> None:
    """A stage that never runs cannot pass."""
    found = one(check_problems(tmp_path, MATRIX + "    must_pass: [attention]\n"))
    assert found == "7:17: stage 'attention' is not among this check's stages"


def test_prompts_must_come_from_somewhere(tmp_path: Path) -> None:
    """Throughput takes the parity check's prompts; without one there is nothing to measure."""
    text = "  - {kind: throughput, id: t, arms: [{name: mtp}], repeats: 1, max_tokens: 9}\n"
    assert "throughput 't' has no prompts, and no greedy_parity check" in one(check_problems(tmp_path, text))
    assert check_problems(tmp_path, text + PARITY) == []


def test_arm_names(tmp_path: Path) -> None:
    """Two arms of one name, or one called classic, would be pooled."""
    text = "  - {kind: throughput, id: t, prompts: [{text: a}], repeats: 1, max_tokens: 9,"
    text += " arms: [{name: classic}, {name: a}, {name: a}]}\n"
    found = check_problems(tmp_path, text)
    assert ["the name 'classic' is taken" in found[0], "duplicate arm 'a'" in found[1], len(found)] == [True, True, 2]


@pytest.mark.parametrize("path", ["/abs/x", "~/x", "../x", "a/../../x", "C:/x"])
def test_checkpoint_paths_stay_inside(tmp_path: Path, path: str) -> None:
    """An absolute path would also end up in the record."""
    found = one(problems_of(tmp_path, HEAD.replace("{path: target}", f"{{path: '{path}'}}") + PROBE))
    assert found.startswith("5:18: ")
    assert "the spec's folder or $HARNESS_MODELS" in found


def test_everything_is_reported_at_once_and_sorted(tmp_path: Path) -> None:
    """One mistake at a time makes ten runs of ten mistakes; broken checks must not hide the rules of good ones."""
    text = HEAD.replace("schema: 1", "schema: 2") + PROBE + PROBE + "  - {kind: nope, id: x}\n" + MATRIX.replace("MULTIROW", "MULTIROWS")  # fmt: skip  # noqa: E501
    found = problems_of(tmp_path, text)
    assert [text_.split(":", 1)[0] for text_ in found] == ["1", "9", "10", "15"]


def test_several_files_report_together(tmp_path: Path) -> None:
    """`harness check` of a folder shows all bad files."""
    paths = [write(tmp_path, "a: 1\n", "one"), write(tmp_path, "", "two"), tmp_path / "specs" / "three.yaml"]
    with pytest.raises(SpecError) as caught:
        load_specs(paths)
    assert {problem.file for problem in caught.value.problems} == {
        "specs/one.yaml",
        "specs/two.yaml",
        "specs/three.yaml",
    }


def test_problems_are_sorted_by_number_not_by_text() -> None:
    """As text, line 10 sorts before line 9."""
    error = SpecError(
        [Problem("f", 10, 1, "b"), Problem("f", 9, 12, "a"), Problem("f", 9, 2, "c"), Problem("f", 9, 2, "c")]
    )
    assert str(error) == "f:9:2: c\nf:9:12: a\nf:10:1: b"


def test_every_kind_stands_in_a_committed_spec() -> None:
    """A check kind without an example is one that nobody runs."""
    specs = [
        load_spec(ROOT / "specs" / f"{name}.yaml").spec for name in ("gemma4_nano", "gemma4_12b", "kernels_gemma4")
    ]
    assert {check.kind for spec in specs for check in spec.checks} == set(CHECK_MODELS)
    assert {check.kind for check in specs[0].checks} == set(CHECK_MODELS) - {"kernel_throughput", "peer_decode"}


@pytest.mark.parametrize(
    "name",
    [
        "gemma4_nano",
        "gemma4_12b",
        "gemma4_31b",
        "kernels_gemma4",
        "qwen35_4b_dflash",
        "qwen35_4b_seeded",
        "qwen35_nano",
    ],
)
def test_committed_specs_load(name: str) -> None:
    """A spec that ships must be valid."""
    assert load_spec(ROOT / "specs" / f"{name}.yaml").spec.name == name
