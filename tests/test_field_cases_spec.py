"""Field cases of specs, results and speed claims: what users of such tools met, judged from small inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support_harness import SPEC_TEXT, comparison, decision, write_spec
from support_spec import HEAD, PARITY, PROBE, check_problems, problems_of, write

from harness import pairs
from harness.checks import greedy_parity
from harness.checks.base import Judgement
from harness.checks.registry import get
from harness.record.lines import LINE_ADAPTER, AnyLine, ArmLine
from harness.spec import Case, load_spec, plan

# ---- keys that other programs have ----------------------------------------------------------------------------------

FOREIGN = {
    "min_p: 0.2": "byte identity says nothing about sampled",
    "repetition_penalty: 1.5": "byte identity says nothing about sampled",
    "logprobs: 2": "only token ids are compared",
    "stop: [ab]": "only stop ids end a text",
    "grammar: x": "only token ids are compared",
    "tools: []": "only token ids are compared",
    "bos: true": "every prompt begins with one <bos>",
    "slots: 4": "one sequence on one device",
    "ctx: 64": "max_position_embeddings",
    "num_speculative_tokens: 3": "one more than a number of drafts",
    "blok_sizes: [4]": "did you mean 'block_sizes'?",
}


@pytest.mark.parametrize("key", FOREIGN, ids=lambda key: key.split(":")[0])
def test_a_key_of_another_program_is_refused_with_the_reason(tmp_path: Path, key: str) -> None:
    """A sampling, grammar or parallel key that is read over would put a greedy single run under another label."""
    found = check_problems(tmp_path, PARITY.replace("max_tokens: 8}", f"max_tokens: 8, {key}}}"))
    assert len(found) == 1
    assert found[0].startswith(f"1:82: unknown key '{key.split(':')[0]}'; ")
    assert FOREIGN[key] in found[0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("tensor_parallel: 2", "7:3: unknown key 'tensor_parallel'; one sequence on one device"),
        ("kind: draft_model", "7:9: pair.kind: 'draft_model' is not one of mtp"),
        ("blok_size: 3", "7:3: unknown key 'blok_size'; did you mean 'block_size'?"),
    ],
    ids=["tensor-parallel", "draft-model", "typo"],
)
def test_a_pair_of_another_method_is_refused_before_weights_are_read(tmp_path: Path, line: str, says: str) -> None:
    """An assistant that runs as an ordinary draft model, or on two devices, ends in a shape error deep inside."""
    text = HEAD.replace("checks:", f"  {line}\nchecks:") + PROBE
    (found,) = problems_of(tmp_path, text)
    assert found.startswith(says)


@pytest.mark.parametrize("parent", ["checks", "spec"])
def test_a_matrix_under_the_wrong_parent_is_named_with_its_place(tmp_path: Path, parent: str) -> None:
    """A mis-indented matrix must neither vanish nor end in a TypeError."""
    matrix = 'matrix: {multirow: {env: MLXCEL_QMV_MULTIROW, values: [null, "0"]}}\n'
    if parent == "checks":
        (found,) = problems_of(tmp_path, HEAD + PROBE + f"  - {matrix}")
        assert found.startswith("9:5: ")
        assert "missing key 'kind'" in found
    else:
        (found,) = problems_of(tmp_path, HEAD + PROBE + matrix)
        assert found.startswith("9:1: unknown key 'matrix'; ")


# ---- what a result may claim ----------------------------------------------------------------------------------------


@pytest.fixture
def cases(tmp_path: Path) -> dict[str, Case]:
    """The plan of the scripted spec with parity at two block sizes, by name."""
    text = SPEC_TEXT.replace(
        "max_tokens: 9}\n  - {kind: throughput", "max_tokens: 9, block_sizes: [2, 4]}\n  - {kind: throughput"
    )
    return {case.name: case for case in plan(load_spec(write_spec(tmp_path, text)))}


def judge(case: Case, contents: Sequence[dict[str, Any]]) -> Judgement:
    lines: list[AnyLine] = [LINE_ADAPTER.validate_python(content) for content in contents]
    return get(case.kind).judge(case, lines, lines)


def compared(case: Case, size: int, **changes: Any) -> dict[str, Any]:
    """A comparison of nine tokens at one block size; every draft accepted unless changed."""
    accepted = {2: [1, 1, 1, 1], 4: [3, 3]}[size]
    counts = {"accepted_per_round": accepted, "drafted_per_round": [size - 1] * len(accepted)}
    return {**comparison(case.id, "text1", size, "first_difference" not in changes), **counts, **changes}


def parity(case: Case, small: dict[str, Any], large: dict[str, Any]) -> Judgement:
    both = [decision(case.id, True, "c"), decision(case.id, True, "c")]
    return judge(case, [*both, compared(case, 2, **small), compared(case, 4, **large)])


def test_a_difference_at_one_token_whatever_the_block_points_at_numerics(cases: dict[str, Case]) -> None:
    """Rounding turns the same token at every block size; a wrong rollback follows the accepted drafts."""
    case = cases["parity"]
    assert parity(case, {}, {}).outcome == "pass"
    numerics = parity(case, {"first_difference": 4}, {"first_difference": 4})
    assert numerics.outcome == "fail"
    assert "same token at block sizes 2, 4, which points at numerics" in numerics.reason
    rollback = parity(case, {"first_difference": 3}, {"first_difference": 7})
    assert "moves with the block size (token 3 at 2, 7 at 4): accept or rollback" in rollback.reason
    single = parity(case, {"first_difference": 3}, {})
    assert "block size" in single.reason
    assert "points at" not in single.reason


@pytest.mark.parametrize(
    ("margin", "words"),
    [(0.0, "a near tie, which rounding can turn"), (4.1, "too far for rounding"), (None, "")],
    ids=["tie", "far", "unknown"],
)
def test_the_margin_at_a_difference_tells_a_tie_from_a_fault(
    cases: dict[str, Case], margin: float | None, words: str
) -> None:
    """A token that led by four logits and was lost is no rounding, whatever kernel is under suspicion."""
    result = parity(cases["parity"], {"first_difference": 4, "margin": margin}, {})
    assert result.outcome == "fail"
    assert words in result.reason
    assert ("apart" in result.reason) is (margin is not None)


def test_parent_and_engine_agree_on_a_tie() -> None:
    """The parent may not import torch, so it has the number a second time."""
    from engine.margin import TIE_MARGIN

    assert greedy_parity.TIE == TIE_MARGIN


def test_a_run_that_accepted_nothing_says_so_without_a_floor(cases: dict[str, Case]) -> None:
    """ "Passed, but slow" hid drafters that loaded garbage: not one draft in a whole run was accepted."""
    case = cases["parity"]
    none = {"accepted_per_round": [0] * 8, "drafted_per_round": [1] * 8}
    wide = {"accepted_per_round": [0] * 8, "drafted_per_round": [3] * 8}
    result = parity(case, none, wide)
    assert result.outcome == "pass"
    assert "none of 32 drafts was accepted" in result.reason
    assert "accepted" not in parity(case, {}, {}).reason
    strict = dataclasses.replace(case, check=case.check.model_copy(update={"min_acceptance": 0.2}))
    assert parity(strict, none, wide).outcome == "fail"


def arm_line(case: str, slot: str, seconds: float, accepted: tuple[int, ...] = (3, 3), tokens: int = 9) -> ArmLine:
    """One timed run of mtp, or of classic as a bracket."""
    mtp = slot == "arm"
    return ArmLine(
        case=case,
        repeat=0,
        slot=slot,  # type: ignore[arg-type]
        arm="mtp" if mtp else "classic",
        block_size=4 if mtp else 1,
        prompt="text1",
        prompt_tokens=3,
        tokens=tokens,
        sha256="a" * 64,
        distinct_tokens=9,
        ttft_s=0.01,
        decode_s=seconds,
        accepted_per_round=accepted if mtp else (),
        drafted_per_round=(3,) * len(accepted) if mtp else (),
    )


def timed(
    case: Case,
    arm_s: float,
    closing: Sequence[float] = (0.2,) * 3,
    accepted: Sequence[tuple[int, ...]] = ((3, 3),) * 3,
    **by_arm: Sequence[str],
) -> Judgement:
    """Three repeats of classic, mtp, classic; `accepted` are mtp's rounds, `by_arm` the output hashes of an arm's runs
    in order."""
    found: list[dict[str, Any]] = [decision(case.id, True, "c")]
    hashes = {arm: iter(values) for arm, values in by_arm.items()}
    for repeat in range(3):
        for slot, seconds in (("open", 0.2), ("arm", arm_s), ("close", closing[repeat])):
            line = arm_line(case.id, slot, seconds, accepted[repeat])
            sha = next(hashes[line.arm], "a") if line.arm in hashes else "a"
            line = line.model_copy(update={"repeat": repeat, "process": repeat // 2, "sha256": sha * 64})
            found.append(line.model_dump())
    return judge(case, found)


def test_a_fresh_process_that_drafts_otherwise_fails_the_case_and_is_named(cases: dict[str, Case]) -> None:
    """Some new processes accepted nothing: the text stays right, the verdict too, and the mean hides them."""
    case = cases["decode"]
    assert timed(case, 0.1).outcome == "pass"
    found = timed(case, 0.1, accepted=[(3, 3), (3, 3), (0,) * 8])
    assert (found.outcome, found.verdict) == ("fail", None)
    assert found.reason == (
        "prompt text1: mtp does not draft alike each time: 6 of 6 drafts accepted in 2 of 3 runs, "
        "0 of 24 drafts accepted in repeat 3 (process 2)"
    )


@pytest.mark.parametrize(("processes", "verdict"), [((0,) * 9, "faster"), ((0, 0, 0, 1, 1, 1, 2, 2, 2), "unresolved")])
def test_two_speeds_of_a_process_do_not_pass_for_an_effect(processes: Sequence[int], verdict: str) -> None:
    """Steps of 22.5 or 25.5 ms by process, each repeating itself to 0.05 ms, once read as an 11 % change: of three
    processes two have the other speed, and the same nine pairs decide only if they are taken for one process's."""
    lines = []
    for repeat, process in enumerate(processes):
        jitter = 0.00005 * (repeat % 3 - 1)
        arm = 0.0225 if repeat < 6 else 0.0255
        for slot, step in (("open", 0.0255), ("arm", arm + jitter), ("close", 0.0255 - jitter)):
            line = arm_line("decode", slot, step * 100, tokens=101)
            lines.append(line.model_copy(update={"repeat": repeat, "process": process}))
    judged = pairs.judge_pairs(pairs.pairs_of(lines, "mtp"), (), 0.02)
    assert judged.verdict == verdict, judged.reason


def test_an_arm_that_contradicts_itself_is_not_called_different_from_classic(cases: dict[str, Case]) -> None:
    """A race moves the text from run to run; that is another fault than a text which is wrong every time."""
    case = cases["decode"]
    assert timed(case, 0.1).verdict == "faster"
    assert "classic is not deterministic, 2 outputs in 6 runs" in timed(case, 0.1, classic="aaabaa").reason
    assert "mtp is not deterministic, 3 outputs in 3 runs" in timed(case, 0.1, mtp="abc").reason
    wrong = timed(case, 0.1, mtp="bbb")
    assert wrong.outcome == "fail"
    assert wrong.verdict is None
    assert "each arm repeats itself, but not classic, so no speed is stated" in wrong.reason


def test_a_small_gate_under_a_large_spread_is_unresolved_and_says_what_it_takes(cases: dict[str, Case]) -> None:
    """A gate of 3 % where classic against classic spreads by 11 % decides nothing."""
    result = timed(cases["decode"], 0.194, (0.2 / 1.11, 0.2 / 0.95, 0.2 / 1.05))
    assert (result.outcome, result.verdict) == ("unresolved", "unresolved")
    assert "11.0 %, the largest |null|" in result.reason


# ---- clocks ---------------------------------------------------------------------------------------------------------


def test_the_host_clock_measures_a_known_duration() -> None:
    """A timer that counts warm-up or what lies between calls would be wrong by tens of percent: 4 calls of 0.5 ms.

    Short and often, so that one repeat at least is not interrupted by another process.
    """
    import time

    from harness.worker.kernel_clock import KernelArm, time_arms, warm

    def spin() -> None:
        for _ in range(4):
            until = time.perf_counter() + 0.0005
            while time.perf_counter() < until:
                pass

    arm = KernelArm("spin", 1, 1, calls=4, run=spin, clock="host")
    warm(arm)
    (times,) = time_arms([arm], 50, "cpu", lambda repeat: None)
    assert 500 <= min(times) <= 520


# ---- collection -----------------------------------------------------------------------------------------------------

pytest_plugins = ["pytester"]


def collected(pytester: pytest.Pytester, *words: str) -> list[str]:
    """Ids of what pytest would run over `specs/` in a small repository."""
    pytester.makeconftest('pytest_plugins = ["harness.pytest_plugin"]\n')
    marks = '"gpu: x", "slow: x", "bench: x", "weights: x"'
    (pytester.path / "pyproject.toml").write_text(f"[tool.pytest]\nmarkers = [{marks}]\n")
    result = pytester.runpytest_inprocess("--collect-only", "-q", "specs", *words)
    return [line for line in result.outlines if "::" in line and not line.startswith("ERROR")]


def test_a_mark_and_a_check_of_one_name_select_apart(pytester: pytest.Pytester) -> None:
    """A value that spells like a mark once ran under `-m`, and unmarked tests with it."""
    marked = "  - {kind: exactness_probe, id: other, slow: true}\n"
    write(pytester.path, HEAD + PROBE.replace("id: probe", "id: slow") + marked)
    assert collected(pytester, "-m", "slow") == ["specs/tiny.yaml::other"]
    assert collected(pytester, "-m", "not slow") == ["specs/tiny.yaml::slow"]


def test_a_bad_spec_leaves_the_others_collected(pytester: pytest.Pytester) -> None:
    """One typo in one file must not hide every other case."""
    write(pytester.path, HEAD + PROBE)
    write(pytester.path, HEAD.replace("name: tiny", "name: bad") + PROBE.replace("}", ", blok: 4}"), "bad")
    assert collected(pytester) == ["specs/tiny.yaml::probe"]
