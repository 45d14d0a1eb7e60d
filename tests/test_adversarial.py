"""Faults planted in the real engine: each is caught by the check that should catch it, at the right place.

A fault enters through an object (a kernel bundle, a cache, a target, a drafter, a request), never
through a global. Every test also shows that the same check passes without the fault.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import support_faults as faults
import torch
from support_loop import parity, script, scripted

from engine.cache import RingCache
from engine.decision import decide, prepare_mtp
from engine.dispatch import STAGES, DispatchPolicy
from engine.pair import load_pair
from engine.requests import GenerationRequest
from engine.shared import shared_kv_problem
from engine.speculative import speculative_decode


def assert_sound(block_size=4):
    """The same probe passes on the same target without the fault."""
    assert faults.passed(faults.sound_probe(block_size)) == [True] * 4


ONE_BIT = [
    ("layer 0 q_proj+k_proj+v_proj", (0, "sliding", "q_proj", 2)),
    ("layer 3 o_proj", (3, "sliding", "attention output", 2)),
    ("layer 5 down_proj", (5, "full", "MLP output", 2)),
    ("LM head", (6, "final", "LM head", 2)),
]


@pytest.mark.parametrize(("matrix", "place"), ONE_BIT, ids=[matrix.replace(" ", "-") for matrix, _ in ONE_BIT])
def test_last_bits_of_one_row_at_one_width(matrix, place):
    """Guards a product that depends on the row count: block 4 is declined and named, 3 and 5 engage."""

    def change(out, rows):
        if rows == 4:
            faults.flip_last_bits(out[2])

    faulty = faults.linear_fault(matrix, change)
    result = faults.probe(faulty, walk=False)
    assert not result.passed
    assert faults.place(result) == place
    assert 0 < result.first_divergence.differing_bytes <= result.first_divergence.total_bytes // 2
    for width in (3, 5):
        assert_sound(width)
        assert faults.probe(faulty, width, walk=False).passed
    assert_sound()


def leak(out, rows):
    """Row 1 takes a little of the row behind it, which in a round is a draft that may be wrong."""
    if rows > 1:
        out[1] += out[2] * 2**-6


def leave_unwritten(out, rows):
    """Rows behind the first hold whatever was in memory."""
    if rows > 1:
        out[1:] = torch.empty_like(out[1:])


def repeat_first(out, rows):
    """Every row is the first one's result."""
    out[1:] = out[:1]


@pytest.mark.parametrize("change", [leak, leave_unwritten, repeat_first], ids=["leak", "unwritten", "repeated"])
def test_a_product_that_is_right_only_in_its_first_row(change):
    """Guards a kernel that mixes rows, leaves them unwritten or repeats one: row 1 of the product is named."""
    result = faults.probe(faults.linear_fault("layer 2 o_proj", change), walk=False)
    assert faults.passed(result) == [False] * 3
    assert faults.place(result) == (2, "sliding", "attention output", 1)
    assert_sound()


ROPE = [(faults.ShiftedTable, 0), (faults.FrozenTable, 1)]


@pytest.mark.parametrize(("table", "position"), ROPE, ids=["off-by-one", "all-at-the-first"])
@pytest.mark.parametrize(("kind", "layer"), [("sliding", 0), ("full", 5)], ids=["sliding", "full"])
def test_rope_at_the_wrong_position_in_verify(kind, layer, table, position):
    """Guards a verify block whose rows turn by another position than decode's: q_rope is named, not attention."""
    result = faults.probe(faults.VerifyBy(faults.with_rope(table, kind)), walk=False)
    assert faults.passed(result) == [False] * 3
    assert faults.place(result) == (layer, kind, "q_rope", position)
    assert_sound()


class ForgetfulRing(RingCache):
    """Once the ring has gone round, a rollback leaves a rejected row in the newest kept slot."""

    def rollback(self, n):
        super().rollback(n)
        if n and self.wrapped:
            self.kv[:, :, (self.length - 1) % self.slots] = self.kv[:, :, self.length % self.slots]


def test_a_rollback_that_forgets_one_ring_slot():
    """Guards a rejected key left behind after a wrap: only the walk sees it, and names the cache, not a kernel."""
    result = faults.probe(faults.WithRing(ForgetfulRing))
    assert faults.passed(result) == [True, True, True, False]
    assert faults.place(result) == (0, "sliding", "K/V cache", 4)
    assert_sound()


class SlotOrderRing(RingCache):
    """Rows across the ring's end come in slot order."""

    def rows(self, first, end):
        start, stop = first % self.slots, (end - 1) % self.slots + 1
        if start < stop:
            return super().rows(first, end)
        return torch.cat((self.kv[:, :, :stop], self.kv[:, :, start:]), 2)


def test_slot_order_instead_of_position_order_after_a_wrap():
    """Guards keys visited in the order in which they lie: only past the wrap, so only the walk sees it."""
    result = faults.probe(faults.WithRing(SlotOrderRing))
    assert faults.passed(result) == [True, True, True, False]
    layer, kind, op, _ = faults.place(result)
    assert (layer, kind, op) == (0, "sliding", "attention core")
    assert_sound()


def spans_fault(change):
    """The tiny target with one-row attention over changed key spans, in verify only."""
    sound = faults.target().kernels.sdpa_rows

    def sdpa_rows(q, k, v, spans, first=0):
        return sound(q, k, v, [change(start, end, k.shape[1]) for start, end in spans])

    return faults.VerifyBy(faults.with_kernels(sdpa_rows=sdpa_rows))


def test_a_stale_key_that_stays_visible():
    """Guards a window that is one key too wide in verify: invisible before the window is full, caught by the walk."""
    result = faults.probe(spans_fault(lambda start, end, count: (max(start - 1, 0), end)))
    assert faults.passed(result) == [True, True, True, False]
    assert faults.place(result) == (0, "sliding", "attention core", 1)
    assert_sound()


def test_a_future_draft_that_is_visible():
    """Guards a block whose rows see the drafts after them: the first row is named on the first draw."""
    result = faults.probe(spans_fault(lambda start, end, count: (start, min(end + 1, count))), walk=False)
    assert faults.passed(result) == [False] * 3
    assert faults.place(result) == (0, "sliding", "attention core", 0)
    assert_sound()


class NoMargin(RingCache):
    """A ring of exactly the window."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.kv = self.kv[:, :, : self.window].clone()
        self.slots = self.window


def test_a_ring_without_a_margin_is_declined_not_crashed():
    """Guards the slots that a rollback needs after a wrap: the gate closes with the ring's own words."""
    pair = SimpleNamespace(target=faults.WithRing(NoMargin), drafter=faults.pair().drafter)
    decision, result = prepare_mtp(pair, 4)
    assert not decision.engaged
    assert result is None
    assert decision.reason.startswith("exactness probe did not run: cache: ")
    target = faults.target()
    assert decide(target.config, faults.sound_probe(), target.policy.flags, 4, cuda=False).engaged


def test_a_fix_that_moves_classic_decode_is_seen_in_the_chain_hash():
    """Guards meeting the block half-way: both arms agree, but classic decode is not what it was."""

    @dataclass(frozen=True)
    class Moved(DispatchPolicy):
        def geglu(self, rows, bits, decode):
            return "ops"

    moved = faults.probe(faults.target().with_policy(Moved()), walk=False)
    assert moved.passed, "the probe compares the arms with each other only"
    stages = {
        faults.probe(faults.target().with_policy(DispatchPolicy(stage)), walk=False).chain_sha256 for stage in STAGES
    }
    assert len(stages) == 1
    assert moved.chain_sha256 not in stages


# -- what the drafter is handed, and the prefill ----------------------------------------------------------------------

SHARED_TOKENS = tuple(range(5, 45))


def other_layer(target, caches, shared):
    """The first sliding layer instead of the last."""
    kv = caches[0].committed()
    return replace(shared, sliding=(kv[0], kv[1]))


def rescaled(target, caches, shared):
    """A full-layer K that somebody scaled once more."""
    return replace(shared, full=(shared.full[0] * 0.5, shared.full[1]))


def one_too_long(target, caches, shared):
    """Counts a rejected row as committed."""
    return replace(shared, length=shared.length + 1)


SHARED = [
    (other_layer, "shared sliding K: "),
    (rescaled, "shared full K: "),
    (one_too_long, "shared K/V: length 42, but 41 rows are committed"),
]


@pytest.mark.parametrize(("change", "text"), SHARED, ids=["other-layer", "rescaled", "rejected-row"])
def test_a_drafter_that_is_handed_the_wrong_keys_never_changes_the_text(change, text):
    """Guards a drafter on another layer's K/V: parity holds, so an assertion on the bytes has to find it."""
    faulty, pair = faults.shared_with(change), faults.pair()
    request = GenerationRequest(SHARED_TOKENS[:20], 12)
    assert parity(pair.target, pair.target, request, 4, pair.drafter).holds
    assert parity(pair.target, faulty, request, 4, pair.drafter).holds
    assert shared_kv_problem(pair.target, SHARED_TOKENS) is None
    assert shared_kv_problem(faulty, SHARED_TOKENS).startswith(text)


NANO = Path(__file__).parent.parent / "specs" / "checkpoints"
CODE = '''def read_lines(path):
    """Return the lines of a text file without their line ends."""
    with open(path, encoding="utf-8") as handle:
        return [line.rstrip("\\\\n") for line in handle]


def count_words(path):
    """Return how often each word occurs in a text file."""
'''


def test_a_drafter_on_the_wrong_layer_falls_below_an_acceptance_floor():
    """Guards the same fault where only counters are at hand: on the trained pair acceptance drops, text does not."""
    pair = load_pair(NANO / "gemma4-nano-it-4bit", NANO / "gemma4-nano-it-assistant-4bit")
    request = GenerationRequest(pair.tokenizer.encode_raw(CODE), 40)

    class WrongLayer(faults.Delegate):
        def shared_kv(self, caches):
            return other_layer(self.base, caches, self.base.shared_kv(caches))

    sound = speculative_decode(pair.target, pair.drafter, request, 4, 0)
    faulty = speculative_decode(WrongLayer(pair.target), pair.drafter, request, 4, 0)
    assert sound.tokens == faulty.tokens
    assert sound.rounds.acceptance_rate >= 0.4
    assert faulty.rounds.acceptance_rate < 0.4


def test_a_prefill_partition_that_differs_between_the_modes():
    """Guards K/V bytes that come from another cut of the prompt, where products depend on their row count.

    The kernel stands for a GPU's: its last bit depends on how many rows run. With one plan for both
    modes nothing differs; rounds that ignore the history boundary differ from the first round on.
    """
    sound = faults.target().kernels.linear_any

    def linear_any(x, w):
        out = sound(x, w)
        if x.shape[0] % 2:
            out = out.clone()
            faults.flip_last_bits(out[-1])
        return out

    target = faults.with_kernels(linear_any=linear_any)
    request = GenerationRequest(SHARED_TOKENS, 8, history_boundary=33)
    drafter = scripted(request, target.config.vocab_size, script("101"))
    assert parity(target, target, request, 4, drafter).holds
    faulty = parity(target, target, request, 4, drafter, rounds_request=replace(request, history_boundary=None))
    assert not faulty.holds
    assert faulty.first_cache[1] == 0, "layer 0's K/V"
