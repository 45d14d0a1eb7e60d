"""The gate: fail-closed, one reason, one log line, once per block size."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support_loop import FakeTarget, OneWidth

from engine import decision as decision_module
from engine.decision import Decision, DecisionMemo, decide, layout_reason, prepare_mtp, width_reason
from engine.flags import Flags
from engine.probe import ExactnessProbe


def geometry(heads=4, kv=2, full_kv=1, head_dim=64, full_head_dim=128, window=16, vocab=29):
    """A config with what the predicate and the probe read."""
    return SimpleNamespace(
        num_attention_heads=heads,
        num_key_value_heads=kv,
        num_global_key_value_heads=full_kv,
        head_dim=head_dim,
        global_head_dim=full_head_dim,
        sliding_window=window,
        vocab_size=vocab,
    )


LARGE = geometry(32, 16, 4, 256, 512)
MIDDLE = geometry(16, 8, 1, 256, 512)
SMALL = geometry()


def pair_of(target, config=SMALL, flags=None, drafter="a drafter"):
    target.config = config
    target.policy = HashablePolicy(flags or Flags())
    target.device = "cpu"
    target.dtype = "float32"
    return SimpleNamespace(target=target, drafter=drafter)


class HashablePolicy(SimpleNamespace):
    """Stands for the frozen dispatch policy."""

    def __init__(self, flags):
        super().__init__(flags=flags)

    def __hash__(self):
        return hash(self.flags)


def test_a_passing_probe_engages(caplog):
    """Guards a gate that stays shut: this is the one way in."""
    with caplog.at_level(logging.INFO, logger="engine"):
        decision, result = prepare_mtp(pair_of(FakeTarget()), 4)
    assert decision.engaged
    assert not decision.inexact
    assert result.passed
    assert decision.log_line.startswith(
        "MTP engaged: verify block is byte-identical to the single-token chain on draw 0"
    )
    assert decision.log_line.endswith("; block size 4")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("INFO", decision.log_line)]


def test_a_failing_probe_declines_with_the_place(caplog):
    """Guards a decline without a reason, and an exception instead of one."""
    with caplog.at_level(logging.INFO, logger="engine"):
        decision, result = prepare_mtp(pair_of(OneWidth()), 4)
    assert not decision.engaged
    assert not result.passed
    assert decision.log_line == f"MTP declined: {decision.reason}"
    assert "first divergence: layer 2 (final) LM head at position 2, 1 of 116 bytes differ" in decision.reason
    assert caplog.records[0].levelname == "WARNING"


def test_the_override_engages_loudly_and_is_marked():
    """Guards an inexact run that looks like an exact one."""
    flags = replace(Flags(), allow_inexact=True)
    decision, _ = prepare_mtp(pair_of(OneWidth(), flags=flags), 4)
    assert decision.engaged
    assert decision.inexact
    assert decision.log_line.startswith("MTP engaged: INEXACT, output may differ from classic decode")
    exact, _ = prepare_mtp(pair_of(FakeTarget(), flags=flags), 4)
    assert exact.engaged
    assert not exact.inexact


class Raises(FakeTarget):
    def perturb(self, logits, start, mode):
        raise RuntimeError("two\nlines")


@pytest.mark.parametrize("allow_inexact", [False, True], ids=["exact", "override"])
def test_an_exception_in_the_probe_declines(allow_inexact):
    """Guards a crash at start-up, and an override that engages without a measurement."""
    flags = replace(Flags(), allow_inexact=allow_inexact)
    decision, result = prepare_mtp(pair_of(Raises(), flags=flags), 4)
    assert (decision.engaged, result) == (False, None)
    assert decision.reason == "exactness probe did not run: two lines"


@pytest.mark.parametrize(
    ("block_size", "text"),
    [(1, "block size 1 drafts nothing"), (9, "block size 9 is above the 8 rows that verify keeps exact")],
    ids="block{}".format,
)
def test_widths_outside_the_contract_decline(block_size, text):
    """Guards a width that no probe can vouch for."""
    decision, result = prepare_mtp(pair_of(FakeTarget()), block_size)
    assert (decision.engaged, decision.reason, result) == (False, text, None)
    assert width_reason(4) is None


def test_a_pair_without_drafter_declines():
    """Guards rounds that run without anyone to draft."""
    decision, _ = prepare_mtp(pair_of(FakeTarget(), drafter=None), 4)
    assert decision == Decision(False, "this pair has no drafter")


def test_no_result_and_a_result_of_another_width_decline():
    """Guards reading one width's verdict as another's."""
    assert decide(SMALL, None, Flags(), 4, False).reason == "exactness probe did not run"
    result = ExactnessProbe(FakeTarget(), 3).run((8,))
    assert decide(SMALL, result, Flags(), 3, False).engaged
    assert decide(SMALL, result, Flags(), 4, False).reason == "exactness probe ran at another block size than 4"
    assert decide(SMALL, result, Flags(), 3, False, reason="the caller says no").log_line == (
        "MTP declined: the caller says no"
    )


@pytest.mark.parametrize(
    ("config", "cuda", "required"),
    [(LARGE, False, True), (LARGE, True, True), (MIDDLE, False, False), (MIDDLE, True, True), (SMALL, True, False)],
    ids=["31b-cpu", "31b-cuda", "12b-cpu", "12b-cuda", "nano-cuda"],
)
def test_the_long_draw_is_demanded_where_the_geometry_needs_it(config, cuda, required):
    """Guards engaging a pair that needs the draw past the window without having run it."""
    short = ExactnessProbe(FakeTarget(), 4).run((8, 8, 8), walk=False)
    decision = decide(config, short, Flags(), 4, cuda)
    assert decision.engaged is not required
    if required:
        assert decision.reason == "exactness probe lacks the draw of 48 tokens that this geometry requires"
        assert decide(config, ExactnessProbe(FakeTarget(), 4).run((8, 48), walk=False), Flags(), 4, cuda).engaged


def test_prepare_adds_the_required_long_draw():
    """Guards a default probe that the gate then turns down."""
    decision, result = prepare_mtp(pair_of(FakeTarget(), LARGE), 4)
    assert decision.engaged
    assert [outcome.prompt_length for outcome in result.outcomes] == [8, 8, 8, 48, 48, 160]


def test_trees_and_batches_decline_without_naming_a_geometry():
    """Guards a reason that speaks of one model while another is loaded."""
    batch = layout_reason(MIDDLE, True, batch=2)
    tree = layout_reason(LARGE, False, tree=True)
    assert batch == "row-wise exact verification takes one sequence at a time, not a batch of 2"
    assert tree == "row-wise exact verification requires a linear draft layout, not a tree"
    assert layout_reason(LARGE, True) is None
    assert layout_reason(SMALL, True, batch=2, tree=True) is None


def test_decisions_are_remembered_per_block_size():
    """Guards one width's verdict serving another, and a probe on every request."""
    target, memo = OneWidth(), DecisionMemo()
    pair = pair_of(target)
    declined, _ = prepare_mtp(pair, 4, memo=memo)
    steps = len(target.step_rows)
    assert prepare_mtp(pair, 4, memo=memo)[0] is declined
    assert len(target.step_rows) == steps
    engaged, _ = prepare_mtp(pair, 3, memo=memo)
    assert (declined.engaged, engaged.engaged) == (False, True)
    assert len(memo.known) == 2


def test_decision_has_one_logger():
    """Guards a log line that the child does not forward."""
    assert decision_module.logger.name == "engine"
