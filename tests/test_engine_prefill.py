"""The prefill plan, and that classic decode and rounds run the same one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_loop import FakeTarget

from engine.decode import classic_decode
from engine.prefill import plan_prefill, run_prefill
from engine.requests import GenerationRequest
from engine.speculative import speculative_decode


@pytest.mark.parametrize(
    ("n_tokens", "boundary", "chunk", "ranges"),
    [
        (1300, 700, 512, [(0, 700), (700, 1212), (1212, 1300)]),
        (40, 34, 2048, [(0, 34), (34, 40)]),
        (40, 34, 0, [(0, 34), (34, 40)]),
        (40, None, 16, [(0, 16), (16, 32), (32, 40)]),
        (40, 40, 0, [(0, 40)]),
        (40, 0, 0, [(0, 40)]),
        (0, None, 8, []),
    ],
    ids=["chat-chunked", "chat-short", "chat-one-pass", "raw-chunked", "all-history", "no-history", "nothing"],
)
def test_plan_examples(n_tokens, boundary, chunk, ranges):
    """Guards the partition that decides K/V bytes: the history is one piece, however long."""
    assert plan_prefill(n_tokens, boundary, chunk) == tuple(range(*ends) for ends in ranges)


@given(n_tokens=st.integers(0, 200), boundary=st.one_of(st.none(), st.integers(0, 200)), chunk=st.integers(0, 70))
def test_plan_covers_every_token_once_in_order(n_tokens, boundary, chunk):
    """Guards a gap, an overlap or an empty piece."""
    plan = plan_prefill(n_tokens, boundary, chunk)
    assert [token for part in plan for token in part] == list(range(n_tokens))
    assert all(len(part) for part in plan)
    if boundary is not None and 0 < boundary < n_tokens:
        assert plan[0] == range(boundary)


@pytest.mark.parametrize(("n_tokens", "chunk"), [(-1, 0), (4, -1)], ids=["count", "chunk"])
def test_negative_sizes_are_refused(n_tokens, chunk):
    """Guards an endless plan."""
    with pytest.raises(ValueError, match="must be 0 or more"):
        plan_prefill(n_tokens, None, chunk)


def test_both_modes_run_the_same_ranges():
    """Guards the partition that differs between modes, which changes text tens of tokens later."""
    request = GenerationRequest(tuple(i % 29 for i in range(40)), 3, history_boundary=34)
    classic, rounds = FakeTarget(), FakeTarget()
    classic_decode(classic, request, 16)
    speculative_decode(rounds, None, request, 1, 16)
    assert classic.prefill_ranges == rounds.prefill_ranges == [(0, 34), (34, 40)]


def test_nothing_to_prefill_is_an_error():
    """Guards a first token made from no prompt."""
    with pytest.raises(ValueError, match="no tokens"):
        run_prefill(FakeTarget(), [], None, 0, FakeTarget().new_caches())
