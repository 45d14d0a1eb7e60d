"""A random Qwen 3.5 pair through the whole harness: the child, its raw lines, the judges, the record."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_engine import one_thread, random_pair_dirs
from support_qwen35 import TINY, qwen_dirs, qwen_pair
from support_record import record_of, run_lines
from support_spec import HEAD, PARITY, PROBE, ROOT, check_problems, problems_of

from engine.cache import LinearCache
from engine.decision import DecisionMemo, hazard_reason, prepare_mtp
from engine.errors import EngineError
from engine.flags import Flags
from engine.qwen35.cache import StateCache
from harness.checks.decline import judge as judge_decline
from harness.checks.decline import measure as measure_decline
from harness.protocol import Setup
from harness.record.lines import ArmLine, CertificateLine, CheckLine, ChildLine, DecisionLine, DrawLine, StepLine
from harness.record.report import check as check_record
from harness.record.sections.context import host, not_covered
from harness.record.sections.summary import summary
from harness.record.speed import oracle_figures, step_figures
from harness.record.store import read_lines
from harness.run import RunOptions, RunOutcome, run_spec
from harness.spec import load_spec
from harness.spec import model as m
from harness.spec.plan import plan
from harness.worker import row_identity
from harness.worker.bench import Bench
from harness.worker.floor import kv_bytes
from harness.worker.jobs import RUNNERS

SMALL = dataclasses.replace(TINY, num_hidden_layers=4, taps=(0, 2), drafter_layers=2)
"""Three linear layers and a full one."""

VERBATIM = (
    "exactness probe did not run: on CUDA this head_dim reaches the fused sdpa_vector kernels, where a verify block's "
    "per-position attention is not bit-equal to the single-token decode it stands for (issue #1935); "
    "MLXCEL_SDPA_VECTOR_LARGE_D=0 restores it"
)
"""The reference system's own words."""

SPEC = """\
schema: 1
name: qwen
title: A tiny random Qwen pair
pair: {target: {path: target}, drafter: {path: drafter}, kind: dflash, block_size: 4}
checks:
  - kind: geometry
    id: geometry
    expect:
      target: {head_dim: 32, linear_num_value_heads: 4, partial_rotary_factor: 0.25}
      drafter: {block_size: 16, num_target_layers: 4}
      full_layers: 1
      linear_singleton_cuda: false
  - {kind: row_identity, id: rows, ops: [linear, rmsnorm, rope, swiglu, output_gate, attention, delta_rule, lm_head]}
  - {kind: exactness_probe, id: probe, draws: [8]}
  - {kind: attribution, id: attribution, draws: [8], walk: false, stages: [base, attention, rowwise]}
  - kind: greedy_parity
    id: parity
    prompts: [{text: "def add(a, b):", form: raw, name: code}, {text: say something, form: chat, name: talk}]
    max_tokens: 12
    ignore_stop: true
    block_sizes: [4]
  - {kind: throughput, id: decode, arms: [{name: w4}], repeats: 3, max_tokens: 8, ignore_stop: true}
  - {kind: decline, id: base, stage: base, expect_reason: layer 0 (linear) delta rule, max_tokens: 8}
  - {kind: decline, id: wide, stage: rowwise, block_size: 16, expect_reason: above the 8 rows, max_tokens: 8}
  - {kind: decline, id: hazard, stage: rowwise, gate: hazard, expect_reason: "issue #1935", requires: {cuda: true}}
"""


def write_spec(folder: Path, text: str = SPEC, pair: tuple[Path, Path] | None = None) -> Path:
    target, drafter = pair or qwen_dirs(SMALL)
    (folder / "specs").mkdir(parents=True)
    (folder / "pyproject.toml").write_text("", encoding="utf-8")
    (folder / "specs" / "target").symlink_to(target)
    (folder / "specs" / "drafter").symlink_to(drafter)
    path = folder / "specs" / "qwen.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def run(folder: Path, path: Path) -> RunOutcome:
    options = RunOptions(out=folder / "out", command="harness run specs/qwen.yaml", lock_dir=folder, threads=1)
    return run_spec(load_spec(path), options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunOutcome]:
    """One run of every kind."""
    folder = tmp_path_factory.mktemp("qwen")
    return folder, run(folder, write_spec(folder))


def test_every_kind_runs_on_a_qwen_pair(whole: tuple[Path, RunOutcome]) -> None:
    """Guards the interface: nothing after the loader may know a family, or this pair would trip over it."""
    _, outcome = whole
    found = {line.case.partition("::")[2]: line.outcome for line in outcome.cases}
    reasons = "\n".join(f"{line.case}: {line.outcome}: {line.reason}" for line in outcome.cases)
    assert found.pop("decode") in ("pass", "unresolved"), reasons
    assert found == {
        "geometry": "pass",
        "rows": "pass",
        "probe": "pass",
        "attribution[stage:base]": "declined",
        "attribution[stage:attention]": "declined",
        "attribution[stage:rowwise]": "pass",
        "parity": "pass",
        "base": "declined",
        "wide": "declined",
        "hazard": "skipped",
    }, reasons
    assert outcome.exit_code == 0
    assert not check_record(outcome.page)


def test_its_record_names_what_each_stage_breaks(whole: tuple[Path, RunOutcome]) -> None:
    """A stage that repaired nothing, or everything, would make the attribution empty words for this family."""
    folder, outcome = whole
    lines = read_lines(folder / "out" / "data" / outcome.page.stem / "runs.jsonl").lines
    ops = {
        line.case.rpartition(":")[2][:-1]: line.found
        for line in lines
        if isinstance(line, CheckLine) and line.case.partition("::")[2].startswith("attribution")
    }
    assert ops == {"base": "rope, attention, delta_rule", "attention": "rope", "rowwise": "none"}
    firsts = {line.case.partition("::")[2]: line.first_divergence for line in lines if isinstance(line, DecisionLine)}
    base, attention = firsts["attribution[stage:base]"], firsts["attribution[stage:attention]"]
    assert base is not None
    assert (base.layer, base.layer_kind, base.op) == (0, "linear", "delta rule")
    assert attention is not None
    assert (attention.layer, attention.layer_kind, attention.op[2:]) == (3, "full", "rope")


def test_a_record_says_that_the_weights_are_random() -> None:
    """A speed-up of random weights is a statement about their shapes; without the words it reads as the pair's."""
    record = record_of(run_lines())
    parts = (summary, host, not_covered)
    assert not any("andom weights" in part(record, "stem") for part in parts)
    target = {**record.children[0].target, "seeded": "random weights from seed 3"}
    children = tuple(child.model_copy(update={"target": target}) for child in record.children)
    told = record.model_copy(update={"children": children})
    assert all("andom weights from seed 3" in part(told, "stem") for part in parts)


def test_a_pair_of_another_kind_than_the_spec_says_is_refused() -> None:
    """The title and the reader's picture of the drafter come from the spec."""
    target, drafter = map(str, qwen_dirs(SMALL))
    assert Bench(Setup(target=target, drafter=drafter, kind="dflash")).pair.family.name == "qwen35"
    with pytest.raises(EngineError, match=r"pair\.kind is mtp, but these checkpoints draft by dflash; write kind: dfl"):
        Bench(Setup(target=target, drafter=drafter, kind="mtp"))
    gemma = random_pair_dirs()
    with pytest.raises(EngineError, match=r"pair\.kind is dflash, but these checkpoints draft by mtp; write kind: mtp"):
        Bench(Setup(target=str(gemma.target), drafter=str(gemma.drafter), kind="dflash"))


def test_a_flag_that_reaches_nothing_in_this_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignored, it would give two cells of the same bytes, and a reader would conclude something from them."""
    monkeypatch.setenv("MLXCEL_COMPILED_QGELU_MLP", "0")
    target, drafter = map(str, qwen_dirs(SMALL))
    with pytest.raises(EngineError, match="MLXCEL_COMPILED_QGELU_MLP has no counterpart in family qwen35: its MLP is"):
        Bench(Setup(target=target, drafter=drafter))


def test_ops_of_another_family_are_refused() -> None:
    """Gemma's default list on this pair must not pass over its recurrence in silence."""
    target, drafter = map(str, qwen_dirs(SMALL))
    bench, args = Bench(Setup(target=target, drafter=drafter)), {"ops": m.GEMMA_OPS, "rows": [2], "seed": 0}
    with pytest.raises(EngineError, match="op geglu is none of this pair's; its ops: linear, rmsnorm, rope, swiglu"):
        row_identity.run(bench, args, Any)


# ---- specs -----------------------------------------------------------------------------------------------------------


def test_a_block_above_eight_rows_may_only_decline(tmp_path: Path) -> None:
    """A probe or an arm of 16 rows could never run, and would look like a finding."""
    wide = "  - {kind: decline, id: d, block_size: 16, expect_reason: rows, prompts: [{text: a b}]}\n"
    assert check_problems(tmp_path, PROBE + wide) == []
    assert check_problems(tmp_path, wide.replace("16", "17")) == [
        "1:40: checks[0].block_size: must be at most 16, found the number 17"
    ]
    for check in (
        "  - {kind: exactness_probe, id: p, block_sizes: [16]}\n",
        "  - {kind: throughput, id: t, arms: [{name: a, block_size: 16}], repeats: 3, max_tokens: 8}\n" + PARITY,
    ):
        (problem,) = check_problems(tmp_path, check)
        assert problem.endswith("must be at most 8, found the number 16")


def test_ops_of_a_pair_have_no_shapes_in_a_geometry(tmp_path: Path) -> None:
    """The child would not know the op, long after the spec could have been corrected."""
    head = HEAD.partition("pair:")[0] + "checks:\n"
    rows = "  - {kind: row_identity, id: r, geometry: tiny, ops: [linear, delta_rule]}\n"
    (problem,) = problems_of(tmp_path, head + rows)
    assert problem.endswith("op delta_rule has no shapes in a geometry, only in a Qwen 3.5 pair")


# ---- step times ------------------------------------------------------------------------------------------------------


def test_a_drafter_of_one_pass_has_a_step_time_at_each_width(whole: tuple[Path, RunOutcome]) -> None:
    """A pass at width 8 divided by 7 drafts says nothing of width 2, where the same pass gives one draft."""
    lines = [
        StepLine(case="c", step=step, rows=rows, context_tokens=9, seconds=(ms / 1000,))  # type: ignore[arg-type]
        for step, rows, ms in (
            ("classic", 1, 10),
            ("verify", 2, 12),
            ("verify", 8, 14),
            ("draft_round", 1, 7),
            ("draft_round", 7, 7.7),
        )
    ]
    (figures,) = oracle_figures(lines, (), False)
    assert {point.block_size: point.draft_step_ms for point in figures.points} == pytest.approx({2: 7.0, 8: 1.1})
    folder, outcome = whole
    measured = read_lines(folder / "out" / "data" / outcome.page.stem / "runs.jsonl").lines
    rounds = [line.rows for line in measured if isinstance(line, StepLine) and line.step == "draft_round"]
    assert rounds == list(range(1, 8))


def test_each_block_size_of_an_older_record_takes_the_pass_of_its_width() -> None:
    """Its raw lines hold a draft line for each width; the last one for all made 1.34x of block size 2 into 1.59x."""
    folder = ROOT / "docs" / "benchmark_results" / "data" / "qwen35-nano-cpu-2026-11-30"
    lines = [line for line in read_lines(folder / "runs.jsonl").lines if isinstance(line, StepLine)]
    drafts = {line.rows: 1000 * statistics.median(line.seconds) for line in lines if line.step == "draft"}
    arms: Any = [SimpleNamespace(block_size=size, acceptance=None, speedup=None) for size in (2, 4, 8)]
    found = {figures.block_size: figures.draft_step_ms for figures in step_figures(lines, arms, False)}
    assert found == pytest.approx(drafts, rel=1e-5)


def test_the_byte_floor_counts_what_the_caches_hold() -> None:
    """On a GPU a floor of Gemma's shapes would end the case, and one without the states would be too low."""
    pair = qwen_pair(SMALL)
    config, caches = pair.target.config, pair.target.new_caches()
    pair.target.prefill([1 + token for token in range(9)], caches)
    rows = sum(layer.committed().nbytes for layer in caches.layers if isinstance(layer, LinearCache))
    states = sum(layer.nbytes for layer in caches.layers if isinstance(layer, StateCache))
    assert states > 0
    assert kv_bytes(config, 8, pair.target.dtype.itemsize) == rows + states


# ---- certificates and ledger -----------------------------------------------------------------------------------------


def test_a_run_certifies_its_arm_and_says_which_flags_reach_nothing(whole: tuple[Path, RunOutcome]) -> None:
    """Without a window a walk covers every length; a flag of the other family must not read as in force."""
    folder, outcome = whole
    lines = read_lines(folder / "out" / "data" / outcome.page.stem / "runs.jsonl").lines
    found = [line for line in lines if isinstance(line, CertificateLine)]
    assert found
    assert {line.identity.window for line in found} == {0}
    assert any(isinstance(line, ArmLine) and line.slot == "arm" for line in lines)
    child = next(line for line in lines if isinstance(line, ChildLine) and line.settings)
    notes = {row.name: row.note for row in child.settings}
    assert notes["MLXCEL_COMPILED_QGELU_MLP"] == "no effect: its MLP is a SwiGLU with one kernel"


# ---- the two gates ---------------------------------------------------------------------------------------------------


class Device:
    """A pair as if it were on CUDA, with a target of another head_dim where one is given."""

    def __init__(self, pair: Any, head_dim: int, flags: Flags = Flags()) -> None:
        target = pair.with_policy(dataclasses.replace(pair.target.policy, flags=flags)).target
        target.device = "cuda:0"
        target.config = dataclasses.replace(target.config, head_dim=head_dim)
        self.target, self.drafter = target, pair.drafter


@pytest.mark.parametrize("head_dim", [256, 288])
def test_the_hazard_gate_declines_on_cuda_in_the_reference_systems_words(head_dim: int) -> None:
    """The reason is what its users saw, so it is compared word by word; nothing is probed."""
    decision, result = prepare_mtp(Device(qwen_pair(SMALL), head_dim), 4, gate="hazard")
    assert result is None
    assert decision.log_line == f"MTP declined: {VERBATIM}"


@pytest.mark.parametrize("name", ["qwen35_4b_dflash", "qwen35_4b_seeded"])
def test_the_committed_specs_expect_the_hazard_word_by_word(name: str) -> None:
    """Folded over lines in YAML, one blank too many would only fail on a GPU."""
    spec = load_spec(ROOT / "specs" / f"{name}.yaml").spec
    (check,) = (check for check in spec.checks if isinstance(check, m.Decline) and check.gate == "hazard")
    assert check.expect_reason == VERBATIM


@pytest.mark.parametrize("holds", [True, False])
def test_the_committed_hazard_check_end_to_end(holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the committed spec to the judgement, on a pair with its head_dim; only "is this CUDA?" is answered for it.

    It runs on a GPU alone, so without this its first run would be the one that is wanted for a record.
    """
    (case,) = (case for case in plan(load_spec(ROOT / "specs" / "qwen35_4b_seeded.yaml")) if "hazard" in case.id)
    real = hazard_reason
    monkeypatch.setattr("engine.decision.hazard_reason", lambda config, cuda, flags: real(config, holds, flags))
    target, drafter = map(str, qwen_dirs(dataclasses.replace(SMALL, head_dim=256)))
    lines: list[Any] = []
    out: Any = SimpleNamespace(case=case.id, line=lines.append, progress=lambda *_: None)
    with one_thread():
        bench = Bench(Setup(target=target, drafter=drafter, kind="dflash"))
        context: Any = SimpleNamespace(job=lambda case, kind, **args: RUNNERS[kind](bench, args, out))
        measure_decline(case, context)
    judgement = judge_decline(case, lines, lines)
    if holds:
        assert judgement.outcome == "declined"
        assert judgement.reason == f"{VERBATIM}; classic output of 1 prompts is unchanged"
        assert not [line for line in lines if isinstance(line, DrawLine)], "nothing is probed"
    else:
        assert judgement.outcome == "fail"
        assert judgement.reason.startswith("declines: expected MTP declined, found MTP engaged")


def test_the_hazard_gate_leaves_the_decision_to_the_probe_where_its_predicate_does_not_hold() -> None:
    """Other widths, a CPU, and the flag that the reason names as the way out."""
    config = qwen_pair(SMALL).target.config
    wide = dataclasses.replace(config, head_dim=256)
    assert hazard_reason(wide, True, Flags()) == VERBATIM
    assert hazard_reason(config, True, Flags()) is None
    assert hazard_reason(wide, False, Flags()) is None
    assert hazard_reason(wide, True, Flags(sdpa_large_d=False)) is None
    with one_thread():
        decision, result = prepare_mtp(qwen_pair(SMALL), 2, draws=(8,), walk=False, gate="hazard")
    assert decision.engaged
    assert result is not None


def test_the_measured_gate_is_the_default_and_the_two_are_remembered_apart() -> None:
    """One memo answering for both would let the static predicate speak for the measurement."""
    pair, memo = qwen_pair(SMALL), DecisionMemo()
    with one_thread():
        measured, result = prepare_mtp(pair, 2, draws=(8,), walk=False, memo=memo)
    assert result is not None
    assert measured.engaged
    prepare_mtp(pair, 2, draws=(8,), walk=False, memo=memo, gate="hazard")
    assert len(memo.known) == 2


def test_the_inexact_override_does_not_open_the_hazard_gate() -> None:
    """The override is for a measured difference; here nothing was measured."""
    decision, _ = prepare_mtp(Device(qwen_pair(SMALL), 256, Flags(allow_inexact=True)), 4, gate="hazard")
    assert not decision.engaged


def test_a_planted_fault_in_the_recurrence_is_named_alone() -> None:
    """row_identity must see a state that a block carries on differently, or its green says nothing."""
    target = qwen_pair(SMALL).target
    assert row_identity.differing_ops(target, 4) == []
    rows = target.delta.delta_rows

    def forgetful(inputs: Any, state: Any, count: int) -> Any:
        out, states = rows(inputs, state, count)
        if count > 2:
            out[count - 1] = out[count - 1] * 1.0001
        return out, states

    faulty = target.with_kernels(target.kernels, dataclasses.replace(target.delta, delta_rows=forgetful))
    assert row_identity.differing_ops(faulty, 4) == ["delta_rule"]
