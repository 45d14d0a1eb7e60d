"""A Qwen 3.5 pair on the triton backend: products, norms, RoPE and attention are Gemma's kernels, the rest torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support_qwen35 import PACKED, qwen_dirs

pytest.importorskip("triton", reason="triton is not built for this platform")

from engine.decision import prepare_mtp
from engine.decode import classic_decode
from engine.dispatch import DispatchPolicy
from engine.pair import Pair, load_pair
from engine.requests import GenerationRequest
from engine.speculative import speculative_decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = replace(PACKED, num_hidden_layers=4, taps=(0, 2), drafter_layers=1, head_dim=64)
"""Three linear layers and a full one, whole groups of 64 everywhere."""

interpreted = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


def pair(backend: str, device: str = "cpu") -> Pair:
    return load_pair(*qwen_dirs(SHAPE, 4), DispatchPolicy(backend=backend), device=device)


@interpreted
@pytest.mark.slow
def test_rows_of_a_block_are_those_of_classic_steps() -> None:
    """Guards what Gemma's kernels never saw: a scale folded into q norms, a quarter of a head turned."""
    ours, plain = pair("triton", DEVICE), pair("reference", DEVICE)
    caches, others = ours.target.new_caches(), plain.target.new_caches()
    ours.target.prefill([5, 6, 7, 8], caches)
    plain.target.prefill([5, 6, 7, 8], others)
    single = caches.clone()
    rows = [ours.target.step([token], single, "classic").logits[0] for token in (9, 10, 11)]
    block = ours.target.step([9, 10, 11], caches, "verify").logits
    assert all(torch.equal(ours_row, row) for ours_row, row in zip(rows, block, strict=True))
    assert single.snapshot_bytes() == caches.snapshot_bytes()
    theirs = plain.target.step([9, 10, 11], others, "verify").logits
    assert (block.float() - theirs.float()).abs().max() < 0.2, "two backends, both bf16"
    caches.rollback(2)
    others.rollback(2)
    hidden = block[0]
    drafts = ours.drafter.draft(10, hidden, ours.target.shared_kv(caches), 3)
    assert drafts[0] == plain.drafter.draft(10, hidden, plain.target.shared_kv(others), 3)[0]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_the_probe_engages_on_a_gpu(block_size: int) -> None:
    """The claim itself, on the hardware that the reference system declined this pair on."""
    found = pair("triton", "cuda")
    decision, _ = prepare_mtp(found, block_size)
    assert decision.engaged, decision.reason
    request = GenerationRequest(tuple(range(5, 40)), 64, ignore_stop=True)
    classic = classic_decode(found.target, request, 0)
    assert speculative_decode(found.target, found.drafter, request, block_size, 0).tokens == classic.tokens
