"""`kernel_throughput`: its spec and plan, its judge on both sides of every bar, its byte checks, and the whole path."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import support_kernel_record as support
import torch
from support_spec import ROOT, problems_of, write
from torch import Tensor

from harness.checks.base import Judgement
from harness.checks.registry import get
from harness.context import RunContext
from harness.errors import UsageError
from harness.kernel_figures import kernel_times, spread
from harness.record.lines import AnyLine, CheckLine, KernelLine, PeerLine
from harness.record.report import check
from harness.run import RunOptions, run_spec
from harness.spec import Case, load_spec, plan
from harness.trial import try_prompt
from harness.worker import kernel_api, kernel_qmv, kernel_rows, row_identity
from harness.worker.kernel_attention import AttentionBench
from harness.worker.kernel_checks import row_checks
from harness.worker.kernel_clock import KernelArm, time_arms
from kernels import MAX_ROWS

HEAD = "schema: 1\nname: tiny\ntitle: Kernels in small\nchecks:\n"
QMV = "  - {kind: kernel_throughput, id: qmv, op: qmv, shapes: [{name: o, k: 128, n: 64, bits: 4}]%s}\n"
ATTENTION = "  - {kind: kernel_throughput, id: a, op: attention, geometries: [tiny], contexts: [48]%s}\n"
SMALL = """\
  - {kind: row_identity, id: rows, geometry: tiny, backend: reference, rows: [1, 3], ops: [linear, rmsnorm, attention]}
  - kind: kernel_throughput
    id: qmv
    op: qmv
    backend: reference
    peers: [stream, tinygemm, mlx]
    repeats: 3
    repeat_calls: 3
    rotate_mb: 1
    bars: {max_rel_error: 5e-3}
    shapes: [{name: o, k: 128, n: 64, bits: 4}, {name: down, k: 192, n: 64, bits: 8}]
  - kind: kernel_throughput
    id: attention
    op: attention
    backend: reference
    geometries: [tiny]
    contexts: [48]
    rows: [1, 4]
    repeats: 3
    repeat_calls: 2
    rotate_mb: 1
"""


def problems(folder: Path, checks: str) -> list[str]:
    return problems_of(folder, HEAD + checks)


# ---- the spec and its plan ------------------------------------------------------------------------------------------


def test_a_spec_of_kernels_needs_no_pair(tmp_path: Path) -> None:
    """And says so for the kinds that do."""
    assert problems(tmp_path, QMV % "" + ATTENTION % "") == []
    (missing,) = problems(tmp_path, "  - {kind: exactness_probe, id: p}\n")
    assert missing == "5:5: exactness_probe 'p' needs a pair, and this spec has none; add `pair`"
    (rows,) = problems(tmp_path, "  - {kind: row_identity, id: r}\n")
    assert rows.endswith("add `pair` or give the check a `geometry`")
    assert problems(tmp_path, "  - {kind: row_identity, id: r, geometry: 12b}\n") == []
    axis = "  - {kind: row_identity, id: r, matrix: {g: {field: geometry, values: [12b, 31b]}}}\n"
    assert problems(tmp_path, axis) == []


def test_a_pair_has_its_own_shapes(tmp_path: Path) -> None:
    """A geometry beside a pair would silently compare other shapes."""
    text = HEAD.replace("checks:", "pair:\n  target: {path: a}\n  drafter: {path: b}\nchecks:")
    (found,) = problems_of(tmp_path, text + "  - {kind: row_identity, id: r, geometry: 12b}\n")
    assert "this one compares the pair's own shapes" in found


@pytest.mark.parametrize(
    ("checks", "said"),
    [
        ("  - {kind: kernel_throughput, id: k, op: qmv}\n", "of op qmv needs `shapes`"),
        ("  - {kind: kernel_throughput, id: k, op: attention, contexts: [8]}\n", "needs `geometries`"),
        (QMV % ", contexts: [8]", "`contexts` is not for op qmv"),
        (QMV.replace("k: 128", "k: 100") % "", "multiple of 64"),
        (QMV.replace("bits: 4", "bits: 3") % "", "bits"),
        (QMV % ", peers: [marlim]", "did you mean 'marlin'"),
        (QMV % ", peers: [mlx, mlx]", "mlx is listed twice"),
        (ATTENTION % ", peers: [stream, marlin]", "a matrix product is no peer of attention"),
        (QMV % ", rows: [1, 4], bars: {max_m8_over_m1: 1.04}", "needs times at 8 rows"),
        (QMV % ", peers: [mlx], bars: {min_stream_share: 0.5}", "add stream to `peers`"),
        (QMV % ", bars: {max_peer_ratio: {marlin: {m1: 0.9}}}", "marlin is not among this check's peers"),
        (QMV % ", peers: [mlx], bars: {max_peer_ratio: {mlx: {m8: 0.9}}}", "needs times at 8 rows"),
        (QMV.replace("bits: 4}", "bits: 4}, {name: p, k: 128, n: 64, bits: 4}") % "", "duplicate cell"),
        (QMV % ", matrix: {shape: {field: seed, values: [1]}}", "the axis 'shape' is already there (key `shapes`)"),
        (QMV % ", bars: {max_rel_eror: 1}", "did you mean 'max_rel_error'"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, checks: str, said: str) -> None:
    """Each with its place, before anything runs."""
    assert any(said in text for text in problems(tmp_path, checks)), problems(tmp_path, checks)


def test_shapes_and_layers_are_axes_and_a_shape_brings_its_bars(tmp_path: Path) -> None:
    """Ids as pytest, the CLI and the record show them; a case's check holds its own shape and merged bars alone."""
    cases = {case.name: case for case in plan(load_spec(write(tmp_path, support.SPEC_TEXT, "kernels_tiny")))}
    assert list(cases) == [
        "rows",
        "qmv[shape:3840x30720-4bit]",
        "qmv[shape:15360x3840-8bit]",
        "attention[geometry:12b+layer:full+context:2048]",
    ]
    small, other = cases["qmv[shape:3840x30720-4bit]"].check, cases["qmv[shape:15360x3840-8bit]"].check
    assert [shape.name for shape in small.shapes] == ["gate+up"]  # type: ignore[union-attr]
    assert small.bars.min_stream_share == 0.6  # type: ignore[union-attr]
    assert other.bars.min_stream_share == 0.7  # type: ignore[union-attr]
    assert other.bars.max_m8_over_m1 == 1.04  # type: ignore[union-attr]
    assert cases["rows"].marks == ("gpu",)
    assert set(cases["qmv[shape:3840x30720-4bit]"].marks) == {"gpu", "slow", "bench"}


def test_the_committed_spec_covers_every_matrix_of_both_targets() -> None:
    """A shape that is left out is one whose regression nobody sees."""
    from harness.worker.kernel_geometry import GEOMETRIES

    cases = plan(load_spec(ROOT / "specs" / "kernels_gemma4.yaml"))
    shapes = {(s.k, s.n, s.bits) for case in cases for s in getattr(case.check, "shapes", ())}
    for name in ("12b", "31b", "drafter_12b"):
        geometry = GEOMETRIES[name]
        wanted = {matrix[1:] for matrix in geometry.matrices} | {(geometry.hidden, geometry.vocabulary, 4)}
        assert wanted <= shapes, (name, wanted - shapes)


def test_without_cuda_every_case_is_skipped_with_the_reason(tmp_path: Path) -> None:
    """Never silently absent, and exit code 0."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    loaded = load_spec(ROOT / "specs" / "kernels_gemma4.yaml")
    only = tuple(case.id for case in plan(loaded) if case.name.startswith(("rows", "qmv8")))
    outcome = run_spec(loaded, RunOptions(out=tmp_path, only=only, lock_dir=tmp_path))
    assert {line.outcome for line in outcome.cases} == {"skipped"}
    assert all("needs CUDA" in line.reason for line in outcome.cases)
    assert outcome.exit_code == 0


def test_a_spec_without_a_pair_cannot_be_tried(tmp_path: Path) -> None:
    """`harness try` generates text; there is nothing to generate with."""
    with pytest.raises(UsageError, match="has no pair to generate with"):
        try_prompt(load_spec(write(tmp_path, HEAD + QMV % "")), "hello")


# ---- the judge ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cases(tmp_path: Path) -> dict[str, Case]:
    """The plan of the synthetic spec, by name."""
    return {case.name: case for case in plan(load_spec(write(tmp_path, support.SPEC_TEXT, "kernels_tiny")))}


def judge(case: Case, lines: Sequence[AnyLine]) -> Judgement:
    return get(case.kind).judge(case, lines, lines)


def qmv(cases: dict[str, Case], **changes: Any) -> Judgement:
    """The judgement on the first product with something changed."""
    return judge(cases["qmv[shape:3840x30720-4bit]"], support.qmv_lines(**changes))


def test_the_good_case_passes_and_says_what_it_found(cases: dict[str, Case]) -> None:
    """All bars met."""
    result = qmv(cases)
    assert result.outcome == "pass", result
    assert "rows exact; 3318 GB/s at M = 1, 0.76 of the stream" in result.reason
    assert result.reason.endswith("6 bars met")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stream": 380.0}, "share of the stream 0.587, bar at least 0.6"),
        ({"eight": 21.2}, "M = 8 over M = 1 1.06, bar at most 1.04"),
        ({"four_launches": 70.0}, "four launches over one 3.47, bar at least 3.6"),
        ({"error": 3e-6}, "relative error 3e-06, bar at most 2e-06"),
        ({"tinygemm": 30.0}, "time over tinygemm's at M = 1 0.667, bar at most 0.65"),
        ({"tinygemm_four": 38.0}, "time over tinygemm's at M = 4 0.532, bar at most 0.5"),
    ],
)
def test_each_bar_fails_alone(cases: dict[str, Case], changes: dict[str, float], said: str) -> None:
    """Each on its bad side; the good side is the test above."""
    result = qmv(cases, **changes)
    assert result.outcome == "fail"
    assert result.reason == said


def test_the_attention_bar(cases: dict[str, Case]) -> None:
    """M = 4 over M = 1."""
    case = cases["attention[geometry:12b+layer:full+context:2048]"]
    assert judge(case, support.attention_lines()).outcome == "pass"
    worse = judge(case, support.attention_lines(four=14.0))
    assert (worse.outcome, worse.reason) == ("fail", "M = 4 over M = 1 1.4, bar at most 1.35")


def test_a_miss_within_the_null_spread_is_unresolved(cases: dict[str, Case]) -> None:
    """Guards against failing, or passing, on noise; an error is not noise."""
    result = qmv(cases, eight=20.9, again=20.5)
    assert result.outcome == "unresolved"
    assert "within the null spread of 2.5 %" in result.reason
    assert qmv(cases, eight=20.9).outcome == "fail"
    assert qmv(cases, error=2.01e-6, again=20.5).outcome == "fail"


def test_differing_bytes_fail_before_any_time(cases: dict[str, Case]) -> None:
    """Every benchmark is a test first."""
    result = qmv(cases, differing=12)
    assert result.outcome == "fail"
    assert result.reason.startswith("M = 1..8 against one-row calls: 12 of 4096 bytes differ")
    timed = support.qmv_lines()
    bad = timed[1].model_copy(update={"differing_bytes": 1})  # says passed, and counts a byte
    assert judge(cases["qmv[shape:3840x30720-4bit]"], [timed[0], bad, *timed[2:]]).outcome == "fail"


def test_a_bar_against_an_absent_peer_is_unresolved_with_the_reason(cases: dict[str, Case]) -> None:
    """A claim that could not be looked at is not a claim that holds."""
    result = qmv(cases, tinygemm_reason="torch 2.11.0 has no _weight_int4pack_mm")
    assert result.outcome == "unresolved"
    assert "was not measured: torch 2.11.0 has no _weight_int4pack_mm" in result.reason


def dropped(lines: Sequence[AnyLine], unwanted: Callable[[AnyLine], bool]) -> list[AnyLine]:
    return [line for line in lines if not unwanted(line)]


def is_arm(arm: str, rows: int, again: bool = False, launches: int = 1) -> Callable[[AnyLine], bool]:
    return lambda line: (
        isinstance(line, KernelLine)
        and (line.arm, line.rows, line.again, line.launches)
        == (
            arm,
            rows,
            again,
            launches,
        )
    )


@pytest.mark.parametrize(
    ("unwanted", "said"),
    [
        (lambda line: isinstance(line, CheckLine), "no row was compared"),
        (lambda line: isinstance(line, PeerLine) and line.peer == "marlin", "peer marlin was neither measured nor"),
        (is_arm("ours", 8), "ours at M = 8 was not timed"),
        (is_arm("ours", 1, launches=4), "ours at M = 1, four launches was not timed"),
        (is_arm("ours", 1, again=True), "ours at M = 1, again was not timed"),
        (is_arm("stream", 0), "stream at M = 0 was not timed"),
        (is_arm("tinygemm", 4), "tinygemm at M = 4 was not timed"),
    ],
)
def test_what_is_missing_is_an_error(cases: dict[str, Case], unwanted: Callable[[AnyLine], bool], said: str) -> None:
    """Guards against passing on half a measurement."""
    result = judge(cases["qmv[shape:3840x30720-4bit]"], dropped(support.qmv_lines(), unwanted))
    assert result.outcome == "error"
    assert said in result.reason


def test_times_that_cannot_be_are_errors(cases: dict[str, Case]) -> None:
    """A repeat short, a time of nothing, and a rate that only a cache has."""
    case, lines = cases["qmv[shape:3840x30720-4bit]"], support.qmv_lines()
    place = next(i for i, line in enumerate(lines) if is_arm("ours", 4)(line))
    short = [*lines[:place], lines[place].model_copy(update={"us": (20.0,) * 4}), *lines[place + 1 :]]
    assert "4 of 5 repeats" in judge(case, short).reason
    nothing = [*lines[:place], lines[place].model_copy(update={"us": (0.0,) * 5}), *lines[place + 1 :]]
    assert "cannot be" in judge(case, nothing).reason
    cached = judge(case, support.qmv_lines(one=10.0, four=10.0, eight=10.0, four_launches=40.0, again=10.0))
    assert (cached.outcome, cached.reason.rpartition(": ")[2]) == ("error", "not from memory")


def test_the_null_spread() -> None:
    """Its middle counts, not a single outlier; of nothing there is none."""
    assert spread(()) is None
    assert spread((0.01,)) == 0.01
    assert spread((0.02, 0.02, 0.02)) == pytest.approx(0.02)
    assert spread((0.0, 0.001, -0.001, 0.9, 0.0)) == pytest.approx(0.00125, rel=0.05)
    assert kernel_times(support.qmv_lines(again=20.2)).null_spread == pytest.approx(0.01, rel=1e-3)


# ---- the child's work -----------------------------------------------------------------------------------------------


def first_difference(call: Callable[[Tensor, int], Tensor], repeat_calls: int = 2) -> str:
    """Name of the first statement that does not hold."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    found = row_checks(call, call, x, lambda: call(x, 8), repeat_calls)
    return next((item.name for item in found if item.differing), "none")


def test_byte_checks_pass_a_row_wise_op_and_catch_each_fault() -> None:
    """A kernel that knows M, its slot or its neighbours, one that drifts, and one that hands out its own buffer."""
    calls = [0]
    held = torch.zeros(8, 32)

    def sound(x: Tensor, rows: int) -> Tensor:
        return x.float() * 2

    def knows_m(x: Tensor, rows: int) -> Tensor:
        return x.float() * (2 if rows < 4 else 2.0000005)

    def knows_slot(x: Tensor, rows: int) -> Tensor:
        out = x.float() * 2
        out[5:] *= 1.0000002
        return out

    def sees_neighbour(x: Tensor, rows: int) -> Tensor:
        return x.float() + 0 * x.float().roll(1, 0)

    def drifts(x: Tensor, rows: int) -> Tensor:
        calls[0] += 1
        return x.float() * (2 if calls[0] != 200 else 3)

    def own_buffer(x: Tensor, rows: int) -> Tensor:
        held[:rows] = x[:rows].float() * (2 if rows < 8 else 3)
        return held

    assert first_difference(sound) == "none"
    assert first_difference(knows_m) == "M = 1..8 against one-row calls"
    assert first_difference(knows_slot) == "M = 1..8 against one-row calls"
    assert first_difference(sees_neighbour) == "a row alone, NaN in the other slots"
    assert first_difference(drifts, 400) == "400 identical calls"
    assert first_difference(own_buffer) == "M = 1..8 against one-row calls"


@pytest.mark.parametrize("bits", [4, 8])
def test_random_codes_use_their_range_and_the_reference_computes_them(bits: int) -> None:
    """The matrix that is timed is a real quantized one, and its float64 reference is its product."""
    codes = kernel_qmv.random_codes(24, 192, bits, torch.Generator().manual_seed(1), "cpu")
    assert int(codes.codes.max()) == (1 << bits) - 1
    assert int(codes.codes.min()) == 0
    ours = kernel_api.product("reference", codes.codes, codes.scales, codes.biases, bits, 2)
    x = torch.randn(8, 192, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    expected = kernel_qmv.exact(x, codes.codes, codes.scales, codes.biases)
    found = kernel_api.total(ours.run(ours.pack(x), 1, 8))
    assert kernel_qmv.rel_error(found, expected) < 5e-3  # bf16 weights and one rounding
    assert kernel_qmv.rel_error(found * 1.1, expected) > 5e-2


def test_copies_and_sequences() -> None:
    """Weights are rotated beyond the cache, and one launch never runs on the same copy as the one before."""
    assert kernel_qmv.copies_for(66_000_000, 512, "cuda") == 8
    assert kernel_qmv.copies_for(600_000_000, 512, "cuda") == 2
    assert kernel_qmv.copies_for(1000, 512, "cpu") == 2
    for copies, nbytes in ((8, 66_000_000), (2, 600_000_000), (220, 2_400_000)):
        order = kernel_qmv.sequence(copies, nbytes, 512)
        assert len(order) * nbytes > 9e8
        assert all(a != b for a, b in itertools.pairwise(order))


@pytest.mark.parametrize("layer", ["full", "sliding"])
def test_rows_of_attention_lie_on_both_sides_of_an_edge(layer: str) -> None:
    """Rows inside one block of keys cannot see a tile that reads a block which another tile never stored."""
    args = {"geometry": "12b", "layer": layer, "context": 2048, "backend": "reference", "seed": 0}
    bench = AttentionBench({**args, "rotate_mb": 1, "repeat_calls": 1, "rows": [1]}, "cpu")
    places = torch.cat(bench.positions).tolist()
    assert {place // 1024 for place in places} == {1, 2}
    for context in (kernel_rows.FULL_CONTEXT, row_identity.FULL_CONTEXT):
        assert {place // 1024 for place in range(context, context + MAX_ROWS)} == {0, 1}
    for past in (kernel_rows.PAST, row_identity.WRAP):  # behind any window that is whole blocks
        assert {place // 64 for place in range(past, past + MAX_ROWS)} == {0, 1}


def test_arms_are_timed_in_turns() -> None:
    """All of one arm and then all of the other would take a drifting clock for a difference."""
    seen: list[str] = []
    arms = [KernelArm(name, 1, 1, 2, lambda name=name: seen.append(name), clock="host") for name in "ab"]  # type: ignore[misc]
    times = time_arms(arms, 3, "cpu", lambda repeat: None)
    assert "".join(seen) == "ababab"
    assert [len(values) for values in times] == [3, 3]


def test_a_peer_that_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong layout is fast, too."""
    pytest.importorskip("mlx.core")
    args = {"shape": {"name": "o", "k": 128, "n": 64, "bits": 4}, "backend": "reference", "seed": 0, "rotate_mb": 1}
    bench = kernel_qmv.QmvBench({**args, "rows": [1], "peer_rows": [1], "repeat_calls": 1}, "cpu")
    line, arms = bench.peer("mlx", "c")
    assert line.reason is None
    assert [arm.rows for arm in arms] == [1]
    monkeypatch.setattr("tools.peers.base.Affine.words", lambda self: (self.codes[:, 0::2] * 17).view(torch.int32))
    line, arms = bench.peer("mlx", "c")
    assert "its result is another one" in (line.reason or "")
    assert arms == []


def test_every_named_peer_has_a_module_that_says_why_it_is_not_here() -> None:
    """A reason, never an import error."""
    import importlib
    from typing import get_args

    from harness.spec.kernel_model import Peer

    for name in set(get_args(Peer)) - {"stream"}:
        module = importlib.import_module(f"tools.peers.{name}")
        if name != "mlx":
            assert module.available("cpu") == "needs CUDA, and this run is on cpu"
        assert isinstance(module.supports(100, 7, 4), str | None)


# ---- the whole path -------------------------------------------------------------------------------------------------


def test_spec_to_record_with_a_real_child(tmp_path: Path) -> None:
    """On a CPU with the reference backend and tiny shapes: only the speed means nothing."""
    path = write(tmp_path, HEAD + SMALL)
    outcome = run_spec(load_spec(path), RunOptions(out=tmp_path / "out", device="cpu", lock_dir=tmp_path))
    assert [line.outcome for line in outcome.cases] == ["pass"] * 5, outcome.cases
    assert check(outcome.page) == []
    record = json.loads((tmp_path / "out" / "data" / outcome.page.stem / "record.json").read_text(encoding="utf-8"))
    first = record["cases"][1]
    assert first["differing_bytes"] == 0
    kernel = first["kernel"]
    assert set(kernel["us"]) == {"1", "4", "8"}
    assert kernel["m8_over_m1"] > 0
    assert kernel["stream_share"] > 0
    assert {peer["peer"]: peer["reason"] for peer in kernel["peers"]} == {
        "tinygemm": "needs CUDA, and this run is on cpu",
        "mlx": None,
    }
    assert "0 differing bytes over 4 shapes" in record["title"]


def test_a_difference_reaches_the_outcome_and_withholds_every_time(tmp_path: Path) -> None:
    """Through a real child whose byte checks are made to fail: fail, and nothing is timed."""
    fault = tmp_path / "fault.py"
    fault.write_text(
        "import harness.worker.kernel_api as api\n"
        "real = api._reference_product\n"
        "def broken(*args):\n"
        "    made = real(*args)\n"
        "    def run(x, copy, rows):\n"
        "        return made.run(x, copy, rows) * (1 if rows < 5 else 1.01)\n"
        "    return api.replace(made, run=run)\n"
        "api._reference_product = broken\n"
        "import sys\n"
        "from harness.worker.__main__ import main\n"
        "sys.exit(main())\n",
        encoding="utf-8",
    )
    import sys

    case = next(case for case in plan(load_spec(write(tmp_path, HEAD + SMALL))) if case.name.startswith("qmv"))
    command = (sys.executable, str(fault))
    with RunContext(log_dir=tmp_path / "logs", device="cpu", command=command, lock_dir=tmp_path) as context:
        line = context.run(case)
    assert line.outcome == "fail"
    assert "bytes differ, first M = 5, row 0; no figure is stated" in line.reason
    assert not any(isinstance(raw, KernelLine) for raw in context.lines)
