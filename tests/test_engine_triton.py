"""The engine on the triton backend: rows of a verify block against classic steps, and what prepares its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support_engine import TINY, make_pair, random_pair_dirs
from torch import Tensor

pytest.importorskip("triton", reason="triton is not built for this platform")

from engine.cache import Snapshot
from engine.checkpoint import open_checkpoint
from engine.decision import prepare_mtp
from engine.decode import classic_decode
from engine.dispatch import DispatchPolicy
from engine.flags import Flags
from engine.layers import fuse, widen
from engine.pair import Pair, load_pair
from engine.quantize import dequantize, quantize, unpack
from engine.requests import GenerationRequest
from engine.speculative import speculative_decode
from engine.target import Target
from kernels import MAX_ROWS, Stored, Weight, kernels_for
from kernels.repack import dequantize_packed, unpack_dense, unpack_weight
from kernels.testing import row_difference, same_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHECKPOINTS = Path(__file__).resolve().parent.parent / "specs" / "checkpoints"
TINIER = replace(
    TINY, name="tinier", num_hidden_layers=2, period=2, vocab_size=320, hidden_size=64, intermediate_size=64
)
"""One sliding and one full layer: every kernel of the verify path, in as few programs as it gets."""

BF16_LOGITS = 0.05
"""Share of the largest logit by which two backends may differ: both round to bf16 after every op."""

interpreted = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
"""numpy, under the interpreter, announces the infinities of masked scores."""


def matrix(bits: int, rows: int = 48, width: int = 128, seed: int = 0) -> Weight:
    """A matrix as the loader gives it: stored in 4 or 8 bits, or plain bf16 where bits is 16."""
    data = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).mul_(0.1).to(torch.bfloat16)
    if bits == 16:
        return Weight(data.to(DEVICE), 16)
    words, scales, biases = (x.to(DEVICE) for x in quantize(data, bits))
    return Weight(dequantize(words, scales, biases, bits), bits, Stored(words, scales, biases))


def rows_of(width: int = 128) -> Tensor:
    """Eight different rows."""
    return torch.randn(MAX_ROWS, width, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16).to(DEVICE)


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(4, 8), (8, 4), (4, 8, 4)], ids=str)
def test_fused_matrices_of_mixed_bits_keep_their_codes(order: tuple[int, ...]) -> None:
    """A 4-bit q beside an 8-bit k: stored and dequantized forms of the fused matrix are the same matrix."""
    parts = [matrix(bits, 16 * (index + 1), seed=index) for index, bits in enumerate(order)]
    fused = fuse(*parts)
    assert fused.bits == 8
    assert fused.stored is not None
    assert same_bytes(fused.data, torch.cat([part.data for part in parts]))
    stored = fused.stored
    assert stored.words.dtype == torch.uint32
    assert same_bytes(dequantize(stored.words, stored.scales, stored.biases, 8), fused.data)
    with pytest.raises(ValueError, match="words of 4 bits"):
        dequantize(stored.words, stored.scales, stored.biases, 4)


def test_fused_matrices_of_equal_bits_are_not_widened() -> None:
    """Twice the bytes for nothing, on every 4-bit checkpoint."""
    parts = [matrix(4, seed=seed) for seed in range(2)]
    fused = fuse(*parts)
    assert fused.bits == 4
    assert fused.stored is not None
    assert fused.stored.words.shape == (96, 128 * 4 // 32)
    assert same_bytes(fused.data, torch.cat([part.data for part in parts]))


def test_a_part_without_a_stored_form_leaves_none() -> None:
    """Codes of some rows alone would be a smaller matrix."""
    fused = fuse(matrix(4), matrix(16))
    assert fused.stored is None
    assert fused.data.shape == (96, 128)


def test_widened_codes_are_the_same_numbers() -> None:
    """All sixteen codes, in place."""
    weight = matrix(4)
    assert weight.stored is not None
    words, scales, biases = widen(weight.stored, 4, 8)
    assert torch.equal(unpack(words, 8), unpack(weight.stored.words, 4))
    assert unpack(words, 8).unique().numel() == 16
    assert same_bytes(scales, weight.stored.scales)
    assert same_bytes(biases, weight.stored.biases)


def test_the_loader_hands_on_what_the_checkpoint_stores() -> None:
    """Without it the triton backend would stream bf16: four times the bytes."""
    checkpoint = open_checkpoint(random_pair_dirs().target)
    for module, bits in (("layers.0.self_attn.q_proj", 4), ("layers.0.mlp.up_proj", 8)):
        weight = checkpoint.weight(module, torch.bfloat16)
        assert weight.bits == bits
        assert weight.stored is not None
        words = checkpoint.tensor(f"{module}.weight")
        assert same_bytes(weight.stored.words.view(torch.int32), words.view(torch.int32))
        stored = weight.stored
        assert same_bytes(dequantize(stored.words, stored.scales, stored.biases, bits), weight.data)
    plain = open_checkpoint(random_pair_dirs(target_bits=None).target).weight("layers.0.mlp.up_proj", torch.bfloat16)
    assert plain.stored is None
    assert plain.bits == 16


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_prepare_keeps_the_matrix(bits: int) -> None:
    """The packed form is the checkpoint's own codes, or the bf16 matrix where it has none."""
    weight = matrix(bits)
    w = kernels_for("triton").prepare(weight)
    assert (w.out_features, w.in_features, w.bits, w.operand.bits) == (48, 128, bits, bits)
    if weight.stored is None:
        assert same_bytes(unpack_dense(w.operand), weight.data)
        return
    words, scales, biases = unpack_weight(w.operand)
    assert same_bytes(words.view(torch.int32), weight.stored.words.view(torch.int32))
    assert same_bytes(scales, weight.stored.scales)
    assert same_bytes(biases, weight.stored.biases)
    assert same_bytes(dequantize_packed(w.operand, torch.float32).to(torch.bfloat16), weight.data)


def test_prepare_refuses_what_the_kernels_do_not_take() -> None:
    """fp32 models run on the reference backend; scales of another dtype fall back to the bf16 matrix."""
    prepare, weight = kernels_for("triton").prepare, matrix(4)
    with pytest.raises(ValueError, match=r"model dtype torch\.float32; the kernels take bfloat16"):
        prepare(replace(weight, source=weight.data.float()))
    assert weight.stored is not None
    wide = Stored(weight.stored.words, weight.stored.scales.float(), weight.stored.biases.float())
    w = prepare(replace(weight, stored=wide))
    assert (w.bits, w.operand.bits) == (4, 16)
    assert same_bytes(unpack_dense(w.operand), weight.data)


def test_a_stored_matrix_is_not_dequantized_on_the_way() -> None:
    """31B would need 60 GB for what nobody reads."""

    def refuse() -> Tensor:
        raise AssertionError("dequantized")

    parts = [replace(matrix(bits), source=refuse, dtype=torch.bfloat16) for bits in (4, 8)]
    kernels = kernels_for("triton")
    w = kernels.prepare(fuse(*parts))
    assert (w.out_features, w.operand.bits) == (96, 8)
    assert kernels.table(parts[0], w) is w.operand


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_three_ways_to_a_product_have_the_same_bytes(bits: int) -> None:
    """One launch, a launch per row, any number of rows; past 8 rows values alone are the same."""
    kernels, x = kernels_for("triton"), rows_of()
    w = kernels.prepare(matrix(bits))
    block = kernels.linear(x, w, MAX_ROWS)
    assert same_bytes(kernels.linear_rows(x, w, MAX_ROWS), block)
    for count in (1, 3, 8):
        assert same_bytes(kernels.linear_any(x[:count], w), block[:count]), count
    many = kernels.linear_any(torch.cat((x, x)), w)
    torch.testing.assert_close(many, torch.cat((block, block)), rtol=2**-7, atol=1e-2)
    exact = x.double() @ dequantize_packed(w.operand).T
    torch.testing.assert_close(block.double(), exact, rtol=2**-8, atol=1e-5)


def test_the_bundle_keeps_rows_apart() -> None:
    """The whole of `linear`, from bf16 rows to bf16 rows, by the row contract."""
    kernels = kernels_for("triton")
    w = kernels.prepare(matrix(4, rows=32))

    def product(x: Tensor, rows: int) -> Tensor:
        return kernels.linear(x, w, rows)

    assert row_difference(product, [rows_of()], rows=(1, 5), repeats=1) is None


# ---- a model in the interpreter -------------------------------------------------------------------------------------


def logits_of(target: Target, blocks: Sequence[list[int]], mode: str) -> tuple[Tensor, list[Snapshot]]:
    """Logits after a prompt of 12 tokens, a row per token of the blocks, and the cache's bytes."""
    caches = target.new_caches()
    target.prefill(list(range(5, 17)), caches)
    logits = [target.step(block, caches, mode).logits for block in blocks]  # type: ignore[arg-type]
    return torch.cat(logits), caches.snapshot_bytes()


@pytest.fixture(scope="module")
def tiny_target() -> Target:
    """The two-layer target on Triton kernels."""
    return make_pair(TINIER, policy=DispatchPolicy(backend="triton")).target


@interpreted
def test_a_step_in_few_launches_has_the_bytes_of_the_plain_ops(tiny_target: Target) -> None:
    """Logits, hidden states, ids and caches, past the window and across the ring's end; in one launch or per row."""
    plain = tiny_target.with_kernels(replace(tiny_target.kernels, fused=None))
    apart = tiny_target.with_policy(DispatchPolicy(backend="triton", flags=replace(Flags(), qmv_multirow=False)))
    start = tiny_target.new_caches()
    tiny_target.prefill(list(range(5, 26)), start)
    found = []
    for target in (plain, tiny_target, apart):
        caches = start.clone()
        out = target.step([7, 9, 300], caches, "verify")
        found.append((out.logits, out.hidden, out.argmax, caches.snapshot_bytes()))
    for logits, hidden, ids, cached in found[1:]:
        assert same_bytes(logits, found[0][0])
        assert same_bytes(hidden, found[0][1])
        assert ids == found[0][2]
        assert cached == found[0][3]


@pytest.mark.parametrize(
    ("stage", "rows", "decode", "fusable"),
    [
        ("rowwise", 4, False, True),
        ("base", 1, True, True),
        ("base", 4, False, False),
        ("attention_mlp", 4, False, False),
    ],
)
def test_only_decodes_own_kernels_are_fused(
    tiny_target: Target, stage: str, rows: int, decode: bool, fusable: bool
) -> None:
    """A stage that shows an unrepaired block must not be repaired by a shortcut."""
    target = tiny_target.with_policy(DispatchPolicy(stage, backend="triton"))  # type: ignore[arg-type]
    assert target._fusable(rows, decode) is fusable
    assert not target.with_kernels(replace(target.kernels, fused=None))._fusable(rows, decode)


@pytest.mark.slow
@interpreted
def test_a_verify_block_has_the_bytes_of_classic_steps() -> None:
    """Every kernel of the path together: embedding, norms, rotary, caches, attention past the window, MLP, head."""
    target = make_pair(TINIER, policy=DispatchPolicy(backend="triton")).target
    tokens = [7, 9, 11, 13, 300, 301]
    classic, written = logits_of(target, [[token] for token in tokens], "classic")
    block, cached = logits_of(target, [tokens[:4], tokens[4:]], "verify")
    assert same_bytes(block, classic)
    assert [layer.first_position for layer in cached] == [2, 0]
    assert cached == written
    expected, _ = logits_of(make_pair(TINIER).target, [[token] for token in tokens], "classic")
    largest = float(expected.float().abs().max())
    assert largest > 1
    assert float((classic.float() - expected.float()).abs().max()) < BF16_LOGITS * largest


# ---- the trained pair on a GPU --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nano() -> Pair:
    """The committed pair on the GPU's own kernels."""
    if not torch.cuda.is_available():
        pytest.skip(reason="no CUDA device")
    folders = (CHECKPOINTS / name for name in ("gemma4-nano-it-4bit", "gemma4-nano-it-assistant-4bit"))
    return load_pair(*folders, DispatchPolicy(backend="triton"), device="cuda")


@pytest.mark.gpu
def test_the_probe_engages_at_rowwise_and_declines_at_base(nano: Pair) -> None:
    """The start-up probe with its long draw and its walks, past the window of 1,024."""
    draws = (8, 8, 8, 1056)
    decision, result = prepare_mtp(nano, 4, draws, walk=True)
    assert decision.engaged, decision.log_line
    assert not decision.inexact
    assert result is not None
    assert result.passed
    declined, found = prepare_mtp(nano.with_policy(DispatchPolicy("base", backend="triton")), 4, draws, walk=True)
    assert not declined.engaged
    assert found is not None
    assert found.first_divergence is not None


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [2, 4, 8], ids="block{}".format)
@pytest.mark.parametrize("prompt", ["code", "list"])
def test_rounds_equal_classic_on_the_trained_pair(nano: Pair, prompt: str, block_size: int) -> None:
    """128 greedy tokens of real text, drafted by the trained drafter."""
    assert nano.tokenizer is not None
    text = (CHECKPOINTS.parent / "prompts" / f"{prompt}.txt").read_text(encoding="utf-8")
    request = GenerationRequest(tuple(nano.tokenizer.encode_raw(text)), 128, ignore_stop=True)
    classic = classic_decode(nano.target, request, 0)
    rounds = speculative_decode(nano.target, nano.drafter, request, block_size, 0)
    assert rounds.tokens == classic.tokens
    assert len(set(classic.tokens)) > 20
    assert rounds.rounds is not None
    assert rounds.rounds.num_accepted > 0
