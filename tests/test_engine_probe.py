"""The exactness probe: its inputs, its verdict on bytes, and where it says the first divergence is."""

from __future__ import annotations

import pytest
import torch
from support_engine import TINY, TINY_31B, make_pair
from support_loop import FakeCaches, FakeTarget, OneWidth, last_bit

from engine.capture import FINAL_KIND, OPS, Capture
from engine.compare import differing_bytes, flatten, sha256_of, snapshot_difference
from engine.dispatch import STAGES, DispatchPolicy
from engine.localize import CACHE_OP, Divergence, TraceError, compare_captures
from engine.probe import (
    WALK_LENGTH,
    Draw,
    DrawResult,
    ExactnessProbe,
    ProbeResult,
    compare_rows,
    draw_case,
    walk_case,
)
from engine.shared import shared_kv_problem


class LateFault(FakeTarget):
    """Verify rows at one absolute position are off by one bit."""

    def __init__(self, position):
        super().__init__()
        self.position = position

    def perturb(self, logits, start, mode):
        row = self.position - start
        if mode == "verify" and 0 <= row < logits.shape[0]:
            logits[row] = last_bit(logits[row])
        return logits


class ForgetfulCaches(FakeCaches):
    """A rollback of the list leaves its newest rejected row behind."""

    def rollback(self, n):
        super().rollback(n)
        if n:
            self.linear[-1] ^= 1


class ForgetfulTarget(FakeTarget):
    def new_caches(self):
        self.caches = ForgetfulCaches(self.config.sliding_window)
        return self.caches


def test_draw_tokens_follow_the_reference_formula():
    """Guards draws that differ from the reference system's, whose verdicts ours stand beside."""
    draw = Draw(8, 2)
    assert draw.salt == 1955
    assert draw.prompt(4096) == tuple((7 * i + 1 + 1955) % 4096 for i in range(8))
    assert draw.following(4, 4096) == (1958, 1971, 1984, 1997)
    case = draw_case(draw, 4, 4096)
    assert [(block.start, block.tokens, block.kept) for block in case.blocks] == [(0, case.committed, 4)]


@pytest.mark.parametrize("block_size", range(2, 9), ids="block{}".format)
def test_walk_covers_full_partial_and_zero_accepts(block_size):
    """Guards a walk that never rolls back, repeats a row, or lets a wrong draft equal the right token."""
    case = walk_case(Draw(160, 3), block_size, 29)
    assert len(case.committed) == WALK_LENGTH == sum(block.kept for block in case.blocks)
    assert {block.kept for block in case.blocks} == set(range(1, block_size + 1))
    at = 0
    for block in case.blocks:
        assert block.start == at
        assert len(block.tokens) == block_size
        assert block.tokens[: block.kept] == case.committed[at : at + block.kept]
        for offset in range(block.kept, min(block_size, WALK_LENGTH - at)):
            assert block.tokens[offset] != case.committed[at + offset]
        assert all(0 <= token < 29 for token in block.tokens)
        at += block.kept


@pytest.mark.parametrize("block_size", [2, 3, 4, 8], ids="block{}".format)
def test_a_sound_target_passes_everywhere(block_size):
    """Guards a probe that fails without a fault, and one that compared less than it says."""
    target = FakeTarget()
    result = ExactnessProbe(target, block_size).run((8, 8, 8), long=48)
    assert result.passed
    assert result.first_divergence is None
    assert [outcome.name for outcome in result.outcomes] == [
        "draw 0 (8 tokens)",
        "draw 1 (8 tokens)",
        "draw 2 (8 tokens)",
        "draw 3 (48 tokens)",
        "walk of 128 from 48 tokens",
        "walk of 128 from 160 tokens",
    ]
    assert [outcome.positions for outcome in result.outcomes] == [block_size] * 4 + [128] * 2
    assert all(outcome.total_bytes >= outcome.positions * 29 * 4 for outcome in result.outcomes)
    assert result.reason.startswith("verify block is byte-identical to the single-token chain on draw 0 (8 tokens), ")


def test_one_bit_in_one_row_at_one_width_is_caught_and_named():
    """Guards a probe that compares argmax, or only the first row, or another width."""
    target = OneWidth()
    result = ExactnessProbe(target, 4).run((8, 8, 8))
    assert not result.passed
    first = result.outcomes[0]
    assert (first.first_position, first.differing_bytes, first.total_bytes) == (2, 1, 29 * 4)
    assert result.first_divergence == Divergence(2, FINAL_KIND, "LM head", 2, 1, 29 * 4, "draw 0 (8 tokens)")
    assert result.reason == (
        "draw 0 (8 tokens): verify block position 2 differs from the single-token chain in 1 of 116 logit bytes; "
        "first divergence: layer 2 (final) LM head at position 2, 1 of 116 bytes differ"
    )
    assert ExactnessProbe(target, 3).run((8, 8, 8)).passed
    assert ExactnessProbe(target, 5).run((8, 8, 8)).passed


def test_a_fault_late_in_a_walk_is_caught_where_the_short_draws_see_nothing():
    """Guards the blind spot of one block after a short prompt."""
    short = ExactnessProbe(LateFault(160 + 77), 4).run((8, 8, 8), walk=False)
    assert short.passed
    result = ExactnessProbe(LateFault(160 + 77), 4).run((8, 8, 8))
    assert [outcome.passed for outcome in result.outcomes] == [True, True, True, False]
    assert not result.passed
    assert result.reason.startswith("walk of 128 from 160 tokens: verify block position 77 differs")
    assert result.outcomes[3].first_position == 77
    assert result.first_divergence.position == 77


def test_a_bad_rollback_is_named_at_the_cache():
    """Guards a rollback fault reported as a kernel fault of some later row."""
    result = ExactnessProbe(ForgetfulTarget(), 4).run((8, 8, 8))
    assert [outcome.passed for outcome in result.outcomes] == [True, True, True, False]
    divergence = result.first_divergence
    assert (divergence.layer, divergence.kind, divergence.op) == (1, "full", CACHE_OP)
    assert divergence.position == 4


def test_a_cache_fault_that_no_logits_show_fails_the_case():
    """Guards K/V bytes that differ but have not reached a logit yet."""

    class Silent(FakeTarget):
        def step(self, tokens, caches, mode, capture=None):
            output = super().step(tokens, caches, mode, capture)
            if mode == "verify":
                caches.ring[(caches.length - 1) % len(caches.ring)] = (caches.length - 1, 999)
            return output

    result = ExactnessProbe(Silent(), 4).run((8,), walk=False)
    outcome = result.outcomes[0]
    assert not outcome.passed
    assert outcome.first_position is None
    assert outcome.cache_layer == 0
    assert "logits are equal but the K/V cache of layer 0 differs" in result.reason
    assert result.first_divergence.op == CACHE_OP


def test_all_cases_run_after_a_failure_and_the_chain_hash_stays():
    """Guards a chain hash that depends on the verify block's kernels."""
    sound, faulty = (ExactnessProbe(target, 4).run((8, 8)) for target in (FakeTarget(), OneWidth()))
    assert len(sound.outcomes) == len(faulty.outcomes) == 3
    assert sound.chain_sha256 == faulty.chain_sha256
    assert len(sound.chain_sha256) == 64
    assert ExactnessProbe(FakeTarget(seed=1), 4).run((8, 8)).chain_sha256 != sound.chain_sha256


def test_one_prefill_serves_both_arms_and_both_cases_of_the_long_draw():
    """Guards the probe's cost: a prompt is prefilled once a case, the long one once in all."""
    target = FakeTarget()
    ExactnessProbe(target, 4, prefill_chunk=20).run((8, 8), long=48)
    assert target.prefill_ranges == [(0, 8), (0, 8), (0, 20), (20, 40), (40, 48)] + [
        (at, at + 20) for at in range(0, 160, 20)
    ]


@pytest.mark.parametrize(
    ("block_size", "vocab", "draws", "text"),
    [
        (1, 29, (8,), "block size below 2 drafts nothing"),
        (4, 1, (8,), "degenerate vocabulary"),
        (4, 29, (), "no draws asked for"),
        (4, 29, (8, 0), "a draw of 0 tokens has no prompt"),
    ],
    ids=["width", "vocabulary", "no-draws", "empty-prompt"],
)
def test_a_probe_that_cannot_compare_never_passes(block_size, vocab, draws, text):
    """Guards a vacuous pass."""
    result = ExactnessProbe(FakeTarget(vocab_size=vocab), block_size).run(draws)
    assert not result.passed
    assert result.reason == f"exactness probe did not run: {text}"


def test_empty_and_ragged_comparisons_are_not_a_pass():
    """Guards zip() stopping at the shorter arm."""
    row = torch.ones(3)
    with pytest.raises(ValueError, match="arm lengths differ: 2 chain rows, 1 block rows"):
        compare_rows([row, row], [row])
    with pytest.raises(ValueError, match="against"):
        compare_rows([row], [torch.ones(4)])
    with pytest.raises(ValueError, match="arm logits are empty"):
        compare_rows([torch.ones(0)], [torch.ones(0)])
    assert not ProbeResult((), None, 0.0).passed
    empty = DrawResult("draw 0 (8 tokens)", 8, 4, 0, True, 0, 0, None, 0.0)
    assert not ProbeResult((empty,), None, 0.0).passed


def test_logits_of_nan_never_pass():
    """Guards a target whose NaN rows are byte-equal in both arms."""

    class NotANumber(FakeTarget):
        def perturb(self, logits, start, mode):
            return torch.full_like(logits, float("nan"))

    with pytest.raises(ValueError, match="not finite"):
        ExactnessProbe(NotANumber(), 4).run((8,))


def test_a_block_with_missing_rows_is_an_error():
    """Guards comparing the rows that happen to be there."""

    class Short(FakeTarget):
        def perturb(self, logits, start, mode):
            return logits[:-1] if mode == "verify" else logits

    with pytest.raises(ValueError, match="verify gave 3 rows of logits for 4 tokens"):
        ExactnessProbe(Short(), 4).run((8,))


def capture_of(rows, stages=((0, "sliding", "q_proj"), (0, "sliding", "q_rope"))):
    capture = Capture()
    for (layer, kind, op), tensor in zip(stages, rows, strict=True):
        capture.record(layer, kind, op, torch.tensor(tensor))
    return capture


def test_captures_are_compared_in_execution_order():
    """Guards naming the later op: stage by stage, then row by row."""
    steps = [capture_of([[[1.0]], [[2.0]]]), capture_of([[[3.0]], [[4.0]]])]
    block = capture_of([[[1.0], [9.0]], [[9.0], [4.0]]])
    assert compare_captures(steps, block, 10).describe() == (
        "layer 0 (sliding) q_proj at position 11, 2 of 4 bytes differ"
    )
    assert compare_captures(steps, capture_of([[[1.0], [3.0], [7.0]], [[2.0], [4.0], [7.0]]]), 10) is None


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [Capture()],
        [capture_of([[[1.0]]], [(0, "sliding", "q_proj")])],
        [capture_of([[[1.0]], [[2.0]]], [(0, "sliding", "q_rope"), (0, "sliding", "q_proj")])],
        [capture_of([[[1.0], [1.0]], [[2.0], [2.0]]])],
        [capture_of([[[1.0, 1.0]], [[2.0, 2.0]]])],
        [capture_of([[[1.0]], [[2.0]]])] * 2,
    ],
    ids=["no-steps", "empty", "fewer-stages", "other-order", "two-rows", "other-shape", "too-many-steps"],
)
def test_malformed_traces_never_read_as_equal(steps):
    """Guards "nothing differs" for traces that do not line up."""
    with pytest.raises(TraceError):
        compare_captures(steps, capture_of([[[1.0]], [[2.0]]]), 0)


def test_a_divergence_without_a_trace_keeps_its_verdict():
    """Guards a localization problem that turns a failure into a pass or an exception."""

    class Untraceable(OneWidth):
        def step(self, tokens, caches, mode, capture=None):
            return super().step(tokens, caches, mode)

    result = ExactnessProbe(Untraceable(), 4).run((8,), walk=False)
    assert not result.passed
    assert result.first_divergence is None
    assert result.reason.endswith("logit bytes; not localized (probe trace is empty)")


def test_captures_keep_their_rows():
    """Guards a capture that sees later writes to the tensor it was given."""
    rows, capture = torch.zeros(1, 2), Capture()
    capture.record(0, "full", "q_proj", rows)
    rows.fill_(1)
    assert torch.equal(capture.entries[0].rows, torch.zeros(1, 2))
    assert len(set(OPS)) == len(OPS) == 14


def test_bytes_are_compared_not_values():
    """Guards 0.0 == -0.0 and NaN != NaN in a byte comparison."""
    nan = torch.tensor([float("nan"), 1.0])
    assert differing_bytes(nan, nan.clone()) == 0
    assert differing_bytes(torch.tensor([0.0]), torch.tensor([-0.0])) == 1
    assert differing_bytes(torch.ones(2, 3).T, torch.ones(3, 2)) == 0
    with pytest.raises(ValueError, match=r"torch\.float32 against"):
        differing_bytes(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert sha256_of([torch.tensor([1, 2])]) != sha256_of([torch.tensor([2, 1])])


def test_snapshots_are_compared_whatever_their_form():
    """Guards a snapshot part that the comparison leaves out."""
    left = {"k": torch.tensor([1.0]), "at": 3, "raw": b"ab", "more": [torch.tensor([2.0])]}
    assert snapshot_difference(left, dict(left)) == (0, 8 + 8 + 2)
    for key, other in {"k": torch.tensor([1.5]), "at": 4, "raw": b"ac", "more": [torch.tensor([3.0])]}.items():
        assert snapshot_difference(left, {**left, key: other})[0] > 0
    assert snapshot_difference(left, {**left, "more": []}) == (18, 18)
    with pytest.raises(TypeError, match="cannot compare a set"):
        flatten({1})


@pytest.mark.parametrize("geometry", [TINY, TINY_31B], ids=lambda geometry: geometry.name)
def test_real_stages_fail_and_pass_as_they_should(geometry):
    """Guards row-wise verify on one head geometry only: both pass; earlier stages name an op and share the chain."""
    pair = make_pair(geometry)
    results = {}
    for stage in STAGES:
        target = pair.target.with_policy(DispatchPolicy(stage))
        probe = ExactnessProbe(target, 4, walk_prompt=40, walk_length=24)
        results[stage] = probe.run((8, 8, 8), long=48 if stage == "rowwise" else None, walk=stage == "rowwise")
    assert results.pop("rowwise").passed
    for result in results.values():
        assert not result.passed
        assert result.first_divergence.op in OPS
        assert result.first_divergence.describe() in result.reason
    assert len({result.chain_sha256 for result in results.values()}) == 1


@pytest.mark.parametrize("block_size", [2, 3, 5, 8], ids="block{}".format)
def test_the_real_engine_passes_at_every_width(block_size):
    """Guards a width that only a probe of block size 4 would call exact."""
    result = ExactnessProbe(make_pair().target, block_size, walk_prompt=40, walk_length=40).run((8, 8), long=48)
    assert result.passed, result.reason


def test_the_real_drafter_reads_the_right_keys():
    """Guards K/V of another layer, or of rejected rows, in prompts below, at and past the window of 16."""
    target = make_pair().target
    for length in (3, 15, 16, 17, 40):
        assert shared_kv_problem(target, [(7 * i + 3) % 512 for i in range(length)]) is None
