"""The spec linter: one bad spec per rule gives one warning at its place, a good one gives none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support_spec import HEAD, PROBE, ROOT, write

from harness.cli import run_cli
from harness.spec import load_spec
from harness.spec.lint import lint
from harness.spec.lint_rules import RULES, effective
from harness.spec.lint_text import looks_random, sliding_window, token_counter

LONG = "A line of prose that people wrote, one of many that fill the window. " * 16
GOOD = """\
  - {kind: exactness_probe, id: probe, draws: [8, 1056]}
  - kind: greedy_parity
    id: parity
    prompts:
      - {file: prompts/code.txt, form: raw}
      - {file: prompts/prose.txt, form: raw}
    max_tokens: 256
    ignore_stop: true
  - {kind: throughput, id: decode, arms: [{name: mtp}], repeats: 6, max_tokens: 256, ignore_stop: true}
"""
ATTRIBUTION = (
    "  - {kind: attribution, id: attribution, draws: [1056], matrix: {flag: {env: MLXCEL_%s, values: [%s]}}}\n"
)
KERNEL_HEAD = "schema: 1\nname: tiny\ntitle: Kernels\nchecks:\n"
KERNELS = """\
  - {kind: row_identity, id: rows, geometry: tiny}
  - {kind: kernel_throughput, id: qmv, op: qmv, shapes: [{name: gate, k: 128, n: 64, bits: 4}]}
  - {kind: kernel_throughput, id: attention, op: attention, geometries: [tiny], contexts: [64]}
"""


def spec_in(folder: Path, checks: str, head: str = HEAD, window: int | None = 1024) -> Path:
    """A spec with prompts and, where a window is given, a target whose config states it."""
    path = write(folder, head + checks)
    prompts = path.parent / "prompts"
    prompts.mkdir(exist_ok=True)
    (prompts / "code.txt").write_text("def add(a, b):\n    return a + b\n", encoding="utf-8")
    (prompts / "prose.txt").write_text(LONG, encoding="utf-8")
    if window is not None:
        (path.parent / "target").mkdir(exist_ok=True)
        config = {"text_config": {"sliding_window": window}}
        (path.parent / "target" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def warnings(folder: Path, checks: str, head: str = HEAD, window: int | None = 1024) -> list[str]:
    """`line:col: warning: ...` of each warning, lines counted from the first check's line."""
    path = spec_in(folder, checks, head, window)
    lines = head.count("\n")
    return [f"{p.line - lines}:{p.col}: {p.message}" for p in lint(load_spec(path))]


def rules(found: list[str]) -> list[str]:
    """The rule at the end of each warning."""
    return [text.rpartition("[")[2].rstrip("]") for text in found]


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
def test_the_committed_specs_are_clean(name: str) -> None:
    """A warning in a committed spec is a warning that nobody reads."""
    assert lint(load_spec(ROOT / "specs" / f"{name}.yaml")) == ()


def test_a_good_spec_has_no_warning(tmp_path: Path) -> None:
    """The base of every bad one below, so that each fault is the only one."""
    assert warnings(tmp_path, GOOD) == []
    assert warnings(tmp_path, KERNELS, KERNEL_HEAD) == []


FOUR = ", ".join(f"{{file: prompts/prose.txt, name: p{i}}}" for i in range(4))
BAD = {
    "identical-cells": (GOOD + ATTRIBUTION % ("QMV_MULTIROW", 'null, "1"'), '10:.*unset and 1 come to the same'),
    "identical-checks": (GOOD + PROBE.replace("id: probe", "id: again, draws: [8, 1056]"), "10:.*'again' runs exactly"),
    "identical-arms": (
        GOOD.replace("[{name: mtp}]", '[{name: mtp}, {name: two, block_size: 4, env: {MLXCEL_QMV_MULTIROW: "on"}}]'),
        "9:.*arms 'mtp' and 'two' are identical",
    ),
    "nothing-runs": ("  - {kind: exactness_probe, id: probe, draws: [1056], skip: not today}\n", "1:.*every check"),
    "cannot-fail": (GOOD + "  - {kind: attribution, id: a, draws: [1056], must_pass: []}\n", "10:.*cannot fail"),
    "horizon": (GOOD.replace("[8, 1056]", "[8, 512]"), "1:47: .*exactness_probe reaches position 640"),
    "single-prompt": (GOOD.replace("arms:", "prompts: [{file: prompts/prose.txt}], arms:"), "9:.*one prompt"),
    "untimed-prompt": (GOOD.replace("repeats: 6", f"prompts: [{FOUR}], repeats: 3"), "9:.*1 of 4 are never timed"),
    "no-verdict": (GOOD.replace("repeats: 6", "repeats: 2"), "9:.*2 pairs never give a verdict"),
    "no-warmup": (GOOD.replace("repeats: 6", "repeats: 6, warmup: 0"), "9:.*warm-up"),
    "short-gate": (GOOD.replace("repeats: 6, max_tokens: 256", "repeats: 6, max_tokens: 512"), "9:.*256 tokens.*512"),
    "random-prompt": (GOOD.replace("prompts/code.txt, form", "prompts/noise.txt, form"), "5:9: .*random tokens"),
}  # fmt: skip


@pytest.mark.parametrize("rule", BAD)
def test_each_fault_gives_its_one_warning(rule: str, tmp_path: Path) -> None:
    """The rule's name, its place, what is wrong, and after a semicolon what to do."""
    checks, expected = BAD[rule]
    (tmp_path / "specs" / "prompts").mkdir(parents=True)
    (tmp_path / "specs" / "prompts" / "noise.txt").write_text("xq zvkpj wqxg jzkv bqpf xkzt gvwq zpxk jqwv " * 3)
    (found,) = warnings(tmp_path, checks)
    assert rules([found]) == [rule]
    line, _, pattern = expected.partition(":")
    assert found.startswith(f"{line}:")
    assert re.search(pattern.removeprefix(".*"), found)
    assert "warning: " in found
    assert "; " in found


def test_a_probe_must_cover_the_block_size_that_is_timed(tmp_path: Path) -> None:
    """A probe of 4 rows says nothing of 8, and neither does a parity check."""
    found = warnings(tmp_path, GOOD.replace("{name: mtp}", "{name: mtp, block_size: 8}"))
    assert rules(found) == ["no-parity", "unprobed"] or rules(found) == ["unprobed", "no-parity"]
    covered = GOOD.replace("[8, 1056]", "[8, 1056], block_sizes: [4, 8]").replace(
        "    max_tokens", "    block_sizes: [4, 8]\n    max_tokens"
    )
    assert warnings(tmp_path, covered.replace("{name: mtp}", "{name: mtp, block_size: 8}")) == []


def test_a_probe_at_another_stage_is_no_gate(tmp_path: Path) -> None:
    """A benchmark times the row-wise stage, so a probe of the base stage proves nothing for it."""
    assert rules(warnings(tmp_path, GOOD.replace("[8, 1056]", "[8, 1056], stage: attention"))) == ["unprobed"]


def test_flags_of_an_arm_need_a_probe_under_the_same_flags(tmp_path: Path) -> None:
    """Another switch is another kernel; an attribution cell that must pass is a probe too."""
    arm = '{name: mtp, env: {MLXCEL_SDPA_VECTOR_LARGE_D: "0"}}'
    flagged = GOOD.replace("{name: mtp}", arm)
    assert rules(warnings(tmp_path, flagged)) == ["unprobed"]
    probed = flagged + ATTRIBUTION % ("SDPA_VECTOR_LARGE_D", 'null, "0"')
    assert warnings(tmp_path, probed) == []
    lenient = probed.replace("draws: [1056], matrix", "draws: [1056], must_pass: [base], matrix")
    assert rules(warnings(tmp_path, lenient)) == ["unprobed"]


def test_an_identity_horizon_inside_the_window_is_flagged(tmp_path: Path) -> None:
    """A bug that acts behind the window passes a 32-token check, and not one that goes past it (case B38)."""
    short = GOOD.replace("max_tokens: 256", "max_tokens: 32").replace("prompts/prose.txt", "prompts/short.txt")
    (tmp_path / "specs" / "prompts").mkdir(parents=True)
    (tmp_path / "specs" / "prompts" / "short.txt").write_text("A short one.")
    (found,) = warnings(tmp_path, short)
    assert "greedy_parity reaches position 64" in found
    assert "1024 + 4" in found
    assert warnings(tmp_path, short.replace("max_tokens: 32", "max_tokens: 1024")) == []
    assert warnings(tmp_path, short, window=32) == []
    assert rules(warnings(tmp_path, short)) == ["horizon"]  # the same spec again: the config decides, nothing else


def test_without_a_checkpoint_the_window_comes_from_the_geometry_check(tmp_path: Path) -> None:
    """A spec whose weights are elsewhere still says what it expects of them."""
    geometry = "  - {kind: geometry, id: g, expect: {target: {sliding_window: 1024}}}\n"
    bad = GOOD.replace("[8, 1056]", "[8, 512]")
    assert warnings(tmp_path, bad, window=None) == []
    assert rules(warnings(tmp_path, geometry + bad, window=None)) == ["horizon"]


def test_a_probe_of_the_timed_block_size_must_go_as_far_as_the_benchmark(tmp_path: Path) -> None:
    """Four rows were probed behind the window, eight were not, and eight are timed there."""
    checks = GOOD.replace("{name: mtp}", "{name: mtp, block_size: 8}").replace("max_tokens: 256", "max_tokens: 2048")
    checks = checks.replace("    ignore_stop", "    block_sizes: [4, 8]\n    ignore_stop")
    short = checks + "  - {kind: exactness_probe, id: wide, draws: [8], walk: false, block_sizes: [8]}\n"
    (found,) = warnings(tmp_path, short)
    assert "past the window of 1024, its probes of block size 8 do not" in found
    assert warnings(tmp_path, short.replace("draws: [8], walk", "draws: [1056], walk")) == []


def test_a_parity_that_stops_early_is_shorter_than_its_benchmark(tmp_path: Path) -> None:
    """The timed run ignores stop tokens, the gate ends at one."""
    (found,) = warnings(tmp_path, GOOD.replace("    ignore_stop: true\n", ""))
    assert "ends at a stop token" in found


KERNEL_BAD = {
    "no-stream": (KERNELS.replace("op: qmv, ", "op: qmv, peers: [tinygemm], "), "2:"),
    "few-calls": (KERNELS.replace("op: qmv, ", "op: qmv, repeat_calls: 10, "), "2:"),
    "small-rotation": (KERNELS.replace("op: qmv, ", "op: qmv, rotate_mb: 32, "), "2:"),
    "rows": (KERNELS.replace("op: qmv, ", "op: qmv, rows: [4, 8], "), "2:"),
    "no-byte-check": (KERNELS.replace("geometries: [tiny]", "geometries: [tiny, 12b]"), "3:"),
}


@pytest.mark.parametrize("rule", KERNEL_BAD)
def test_kernel_times_need_a_ceiling_exact_rows_and_memory(rule: str, tmp_path: Path) -> None:
    """Each of these makes a figure that cannot be compared or believed."""
    checks, place = KERNEL_BAD[rule]
    (found,) = warnings(tmp_path, checks, KERNEL_HEAD)
    assert rules([found]) == [rule]
    assert found.startswith(place)


def test_kernels_without_row_identity_are_flagged_once_each(tmp_path: Path) -> None:
    """No byte check at all, or one on another backend."""
    alone = "".join(KERNELS.splitlines(keepends=True)[1:])
    assert rules(warnings(tmp_path, alone, KERNEL_HEAD)) == ["no-byte-check", "no-byte-check"]
    other = KERNELS.replace("geometry: tiny}", "geometry: tiny, backend: reference}")
    assert rules(warnings(tmp_path, other, KERNEL_HEAD)) == ["no-byte-check", "no-byte-check"]


def test_every_rule_is_broken_by_some_spec_here() -> None:
    """A rule without a failing example is a rule that may never fire."""
    assert {*BAD, *KERNEL_BAD, "unprobed", "no-parity"} == set(RULES)


# ---- comments that answer a warning ---------------------------------------------------------------------------------

ONE = GOOD.replace("repeats: 6", "repeats: 2")
COMMENT = "# lint: allow no-verdict: a smoke run"


@pytest.mark.parametrize(
    "text",
    [
        ONE.replace("ignore_stop: true}\n", f"ignore_stop: true}} {COMMENT}\n"),
        ONE.replace("  - {kind: throughput", f"  {COMMENT}\n  - {{kind: throughput"),
        ONE.replace("  - {kind: throughput", f"  {COMMENT}\n  # and another line\n  - {{kind: throughput"),
    ],
)
def test_a_comment_with_a_reason_answers_a_warning(text: str, tmp_path: Path) -> None:
    """On the line, or above it; with the rule's name and why."""
    assert warnings(tmp_path, ONE) != []
    assert warnings(tmp_path, text) == []


@pytest.mark.parametrize(
    ("comment", "part"),
    [
        ("# lint: allow no-verdict", "no reason for allowing no-verdict"),
        ("# lint: allow no-verdict:", "no reason"),
        ("# lint: allow no-such: why", "unknown rule 'no-such'; rules: cannot-fail"),
        ("# lint: ignore no-verdict: why", "expected `# lint: allow RULE: why`"),
        ("# lint: allow horizon: why", "nothing here breaks horizon"),
    ],
)
def test_a_comment_that_answers_nothing_is_a_warning_itself(comment: str, part: str, tmp_path: Path) -> None:
    """A typo in the comment must not silence, and a stale one must not stay."""
    found = warnings(tmp_path, ONE.replace("  - {kind: throughput", f"  {comment}\n  - {{kind: throughput"))
    assert any(part in text for text in found), found
    assert "no-verdict" in rules(found)


# ---- texts, flags, command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "one two",
        LONG,
        '{"name": "x", "values": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]}',
        "10 20 30 40 50 60 70 80 90 100 110 120 130 140",
        "SELECT id, name FROM users WHERE created_at > now() - interval '7 days' ORDER BY name;",
        "Donaudampfschifffahrtsgesellschaftskapitaen und Rechtsschutzversicherungsgesellschaften",
        "请写一个函数，它接受两个数字并返回它们的和。",
        "Напишите функцию, которая складывает два числа и возвращает результат.",
        "https://example.org/a/b?c=d&e=f#g",
        "func (s *Server) handleRPC(ctx context.Context, req *pb.Req) (*pb.Resp, error) { return nil, nil }",
        *(path.read_text(encoding="utf-8") for path in sorted((ROOT / "specs" / "prompts").glob("*.txt"))),
    ],
)
def test_texts_that_people_write_are_let_pass(text: str) -> None:
    """A warning that cries at code or another language is soon ignored."""
    assert looks_random(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "xq zvkpj wqxg jzkv bqpf xkzt gvwq zpxk jqwv mzxc vbnq wkjf",
        "2841 993 17622 88 40121 7 5519 220 31337 1204 77 90210 8121 44",
        "[17, 2841, 993, 17622, 88, 40121, 77, 5519, 220, 31337, 1204, 771, 90210]",
        "<unused12> hello <0x1F>",
        "aGVsbG8gd29ybGQgdGhpcyBpcyBiYXNlNjQgdGV4dCB0aGF0IG5vYm9keSB3b3VsZCB3cml0ZQ",
        "the кот 猫 แมว قط बिल्ली cat gato",
        "caf\ufffd \ufffd\ufffd",
    ],
)
def test_random_tokens_are_seen(text: str) -> None:
    """Random letters, ids, reserved tokens, base64, a mix of scripts, broken bytes."""
    assert looks_random(text) is not None


def test_flags_are_compared_by_what_they_come_to() -> None:
    """Unset is the default; a row limit of one is multirow off; off needs no limit."""
    assert effective({}) == effective({"MLXCEL_QMV_MULTIROW": "yes"}) == effective({"MLXCEL_QMV_MULTIROW": None})
    assert effective({"MLXCEL_QMV_MULTIROW": "0"}) == effective({"MLXCEL_QMV_MULTIROW_MAX_ROWS": "1"})
    assert effective({"MLXCEL_QMV_MULTIROW": "0"}) != effective({})
    assert effective({"MLXCEL_QMV_MULTIROW_MAX_ROWS": "4"}) != effective({})


def test_prompts_are_counted_with_the_tokenizer_where_there_is_one(tmp_path: Path) -> None:
    """Else by bytes, which are never fewer, so that the horizon rule stays quiet when in doubt."""
    nano = ROOT / "specs" / "checkpoints" / "gemma4-nano-it-4bit"
    text = (ROOT / "specs" / "prompts" / "long.txt").read_text(encoding="utf-8")
    assert 900 < token_counter(nano)(text) < 1024
    assert token_counter(None)(text) == token_counter(tmp_path)(text) == len(text.encode())
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert token_counter(tmp_path)(text) == len(text.encode())
    assert sliding_window(nano) == 1024
    assert sliding_window(tmp_path) is None
    (tmp_path / "config.json").write_text("[", encoding="utf-8")
    assert sliding_window(tmp_path) is None


def test_check_prints_warnings_and_strict_makes_them_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Warnings on stderr, the summary on stdout, exit 0; with --strict exit 2."""
    spec_in(tmp_path, ONE)
    monkeypatch.chdir(tmp_path)
    assert run_cli(["check"]) == 0
    out, err = capsys.readouterr()
    assert out == "specs/tiny.yaml: ok, 3 checks, 3 cases, 1 warning\n"
    assert err.startswith("specs/tiny.yaml:16:66: warning: 2 pairs never give a verdict; it takes 3")
    assert run_cli(["check", "--strict"]) == 2
    capsys.readouterr()
    spec_in(tmp_path, GOOD)
    assert run_cli(["check", "--strict"]) == 0
    assert capsys.readouterr() == ("specs/tiny.yaml: ok, 3 checks, 3 cases\n", "")
