"""A Qwen 3.5 pair on the triton backend: products, norms, RoPE and attention are Gemma's kernels, the rest torch.

The tests marked `gpu` take seconds and ask what a record of the real shapes rests on; run them before one.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support_engine import scratch_folder
from support_qwen35 import PACKED, qwen_dirs

pytest.importorskip("triton", reason="triton is not built for this platform")

from engine.decision import prepare_mtp
from engine.decode import classic_decode
from engine.dispatch import DispatchPolicy, Stage
from engine.pair import Pair, load_pair
from engine.requests import GenerationRequest
from engine.shared import after_rollback
from engine.speculative import speculative_decode
from harness.worker.row_identity import differing_ops
from tools.seed_qwen35_pair import REAL, write_pair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = replace(PACKED, num_hidden_layers=4, taps=(0, 2), drafter_layers=1, head_dim=64)
"""Three linear layers and a full one, whole groups of 64 everywhere."""

REAL_LAYERS = replace(
    REAL, vocab_size=2048, num_hidden_layers=5, drafter_layers=1, taps=(0, 1, 2, 3, 4), mask_token_id=2000
)
"""The 4B's layers, four linear ones and a full one: the kernels of a record of it, which the gate may have built."""

REQUEST = GenerationRequest(tuple(range(5, 40)), 32, ignore_stop=True)
interpreted = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")


def pair(backend: str, device: str = "cpu") -> Pair:
    return load_pair(*qwen_dirs(SHAPE, 4), DispatchPolicy(backend=backend), device=device)


@functools.cache
def real_layers(device: str) -> Pair:
    """The pair with the 4B's layers, on the backend that a run takes there."""
    folders = write_pair(Path(scratch_folder()) / "qwen-layers", REAL_LAYERS, 5, "layers")
    return load_pair(*folders, DispatchPolicy(backend="triton" if device == "cuda" else "reference"), device=device)


def at(stage: Stage, flags: str = "") -> Pair:
    """The same pair on this machine's device under another stage, with a flag off."""
    policy = real_layers(DEVICE).target.policy
    changed = replace(policy.flags, **({flags: False} if flags else {}))
    return real_layers(DEVICE).with_policy(replace(policy, stage=stage, flags=changed))


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
@on_gpu
@pytest.mark.parametrize("block_size", [2, 4, 8])
@pytest.mark.parametrize("shape", ["small", "real"])
def test_the_probe_engages_on_a_gpu(shape: str, block_size: int) -> None:
    """The claim itself, on the hardware that the reference system declined this pair on."""
    found = pair("triton", "cuda") if shape == "small" else real_layers("cuda")
    decision, _ = prepare_mtp(found, block_size)
    assert decision.engaged, decision.reason
    classic = classic_decode(found.target, REQUEST, 0)
    assert speculative_decode(found.target, found.drafter, REQUEST, block_size, 0).tokens == classic.tokens


@pytest.mark.gpu
@on_gpu
def test_the_hazard_gate_declines_on_a_gpu_and_its_way_out_is_measured() -> None:
    """Its predicate asks for CUDA, so nowhere else can it be seen to hold; nothing is probed then."""
    decision, result = prepare_mtp(real_layers("cuda"), 4, gate="hazard")
    assert result is None
    assert "(issue #1935); MLXCEL_SDPA_VECTOR_LARGE_D=0 restores it" in decision.reason
    assert not decision.engaged
    decision, result = prepare_mtp(at("rowwise", "sdpa_large_d"), 4, gate="hazard")
    assert result is not None
    assert decision.engaged, decision.reason


@pytest.mark.parametrize("flags", ["", "qmv_multirow", "sdpa_large_d"])
@pytest.mark.gpu
@on_gpu
def test_each_stage_breaks_on_a_gpu_what_its_spec_says(flags: str) -> None:
    """The specs declare these reasons word by word, and classic decode may not move with a stage."""
    probes = {}
    for stage in ("base", "attention", "rowwise"):
        staged = at(stage, flags)  # type: ignore[arg-type]
        probes[stage] = prepare_mtp(staged, 4, (8, 8, 8, 70), walk=False)
        ops = set(differing_ops(staged.target, 4))
        assert {"base": "delta_rule", "attention": "rope"}.get(stage, "") in {"", *ops}
        assert stage != "rowwise" or not ops
    assert "first divergence: layer 0 (linear) delta rule" in probes["base"][0].reason
    assert "layer 3 (full) q_rope" in probes["attention"][0].reason
    assert probes["rowwise"][0].engaged, probes["rowwise"][0].reason
    hashes = {result.chain_sha256 for _, result in probes.values() if result is not None}
    assert len(hashes) == 1


@pytest.mark.gpu
@on_gpu
def test_a_gpu_computes_what_a_cpu_does() -> None:
    """Equal bytes in both modes would also come from a kernel that is wrong in both."""
    ours, plain = real_layers("cuda"), real_layers("cpu")
    prompt, block = [7 * i % 2000 + 1 for i in range(70)], [3, 1, 4, 1, 5, 9, 2, 6]
    logits, hidden = [], []
    for one in (ours, plain):
        shared, made_by = after_rollback(one.target, prompt, block)
        hidden.append(made_by(4, "layer output")[:-1].float().cpu())
        drafts = [one.drafter.draft_logits(3, shared, count) for count in (7, 1)]
        caches = one.target.new_caches()
        one.target.prefill(prompt, caches)
        assert 0 <= one.target.unpadded_step(3, caches) < 2048
        logits.append(torch.cat([one.target.step(block, caches, "verify").logits, *drafts]).float().cpu())
    for theirs, other in (logits, hidden):
        assert (theirs - other).abs().mean() < 0.1 * other.std()
