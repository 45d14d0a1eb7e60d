"""Field cases of drafting and decoding, on random pairs and on targets whose every key matters."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import support_faults as faults
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_engine import TINY, TINY_31B, Geometry, make_pair, random_pair_dirs
from support_loop import FakeTarget, oracle, parity, script, scripted

from engine.decision import prepare_mtp
from engine.decode import classic_decode
from engine.dispatch import DispatchPolicy
from engine.errors import RequestError
from engine.margin import TIE_MARGIN, margin_at
from engine.requests import GenerationRequest
from engine.speculative import speculative_decode
from engine.text import TextStream
from harness.process import Child
from harness.protocol import RawLine, Setup
from kernels import reference
from kernels.testing import same_bytes

pair_of = functools.cache(make_pair)
OTHER_HEADS = replace(
    TINY,
    name="tiny_8_4_1",
    num_attention_heads=8,
    num_key_value_heads=4,
    num_global_key_value_heads=1,
    head_dim=16,
    global_head_dim=32,
)
"""Eight query heads on four sliding KV heads and one full one: 12B's proportions with other groups than tiny's."""


def prompt_of(length: int, vocab: int = 512, salt: int = 1) -> tuple[int, ...]:
    return tuple((5 * i * i + 3 * i + salt) % vocab for i in range(length))


# ---- engaging -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", [TINY, TINY_31B, OTHER_HEADS], ids=lambda geometry: geometry.name)
def test_the_gate_opens_on_every_head_geometry_and_says_where_it_closes(geometry: Geometry) -> None:
    """A row-wise path written for one geometry declined every other pair; without it the place is named, no crash."""
    pair = pair_of(geometry)
    engaged, _ = prepare_mtp(pair, 4, (8, 8, 8), walk=False)
    assert engaged.engaged, engaged.reason
    declined, result = prepare_mtp(pair.with_policy(DispatchPolicy(stage="base")), 4, (8,), walk=False)
    assert not declined.engaged
    assert declined.log_line.startswith("MTP declined: ")
    assert result is not None
    assert result.first_divergence is not None
    assert f"layer {result.first_divergence.layer}" in declined.reason
    assert f"position {result.first_divergence.position}" in declined.reason
    request = GenerationRequest(prompt_of(13), 10)
    assert parity(pair.target, pair.target, request, 4, pair.drafter).holds


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 8, 256, 257], ids="budget{}".format)
def test_no_budget_takes_the_plain_path_in_silence(max_tokens: int) -> None:
    """Requests of up to 256 tokens once never drafted and nothing said so; one token is prefill's, so drafts none."""
    request = GenerationRequest(prompt_of(9, 29), max_tokens)
    result = parity(
        FakeTarget(), FakeTarget(), request, 4, scripted(GenerationRequest(request.tokens, 270), 29, oracle)
    )
    assert result.holds
    assert len(result.rounds.tokens) == max_tokens
    assert (result.rounds.rounds.num_drafted > 0) is (max_tokens > 1)
    assert result.rounds.rounds.num_drafted == 3 * -(-(max_tokens - 1) // 4)


def facts_of_a_fresh_process(tmp_path: Any, number: int) -> tuple[Any, ...]:
    """What one new child says: chain digest of the probe, ids and counters of a generation."""
    dirs = random_pair_dirs()
    digests: list[str] = []

    def hear(event: Any) -> None:
        if isinstance(event, RawLine) and event.line["line"] == "decision":
            digests.append(event.line["classic_sha256"])

    with Child(f"fresh{number}", {}, tmp_path / f"{number}.log") as child:
        child.start(Setup(target=str(dirs.target), drafter=str(dirs.drafter), device="cpu", threads=1))
        job = {"block_size": 4, "prompt": {"name": "p", "form": "raw", "text": "def add(a, b):"}}
        job |= {"max_tokens": 24, "ignore_stop": True}
        child.run("generate", "x", {**job, "mode": "decide"}, timeout_s=60, on_event=hear)
        data = child.run("generate", "x", {**job, "mode": "mtp"}, timeout_s=60, on_event=hear).data
    assert data["engaged"]
    assert len(digests) == 1
    return digests[0], data["sha256"], data["tokens"], tuple(data["accepted_per_round"])


@pytest.mark.slow
def test_fresh_processes_agree_in_logits_ids_and_counters(tmp_path: Any) -> None:
    """Some fresh processes once accepted nothing, others had equal ids and other logits: bytes are compared, apart."""
    assert facts_of_a_fresh_process(tmp_path, 1) == facts_of_a_fresh_process(tmp_path, 2)


# ---- the text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target_bits", "drafter_bits"),
    [({"default": 8}, 4), ({"default": 4}, None), (None, 4)],
    ids=["8bit-with-4bit", "4bit-with-bf16", "bf16-with-4bit"],
)
def test_pairs_of_mixed_storage_keep_the_text(target_bits: dict[str, int] | None, drafter_bits: int | None) -> None:
    """A target's quantization applied to the drafter, or a drafter of other bits, must not move a token."""
    pair = make_pair(target_bits=target_bits, drafter_bits=drafter_bits)
    decision, _ = prepare_mtp(pair, 4, (8,), walk=False)
    assert decision.engaged, decision.reason
    for salt, drafter in ((1, pair.drafter), (7, None)):
        request = GenerationRequest(prompt_of(14, salt=salt), 60)
        used = drafter or scripted(request, 512, script("1101"))
        assert parity(pair.target, pair.target, request, 4, used).holds


def test_one_process_repeats_itself() -> None:
    """A race shows as a text that moves from run to run: twenty runs of one prompt, by rounds and alone."""
    pair = pair_of(TINY)
    request = GenerationRequest(prompt_of(14), 12)
    rounds = {speculative_decode(pair.target, pair.drafter, request, 4, 0).tokens for _ in range(20)}
    assert rounds == {classic_decode(pair.target, request, 0).tokens}


@pytest.mark.parametrize("block_size", [2, 4, 8], ids="block{}".format)
def test_a_block_at_the_end_of_the_context_gives_what_classic_gives(block_size: int) -> None:
    """The last block has rows past the model's last position: computed, never kept, never emitted."""
    pair = pair_of(replace(TINY, name="tiny_ctx32", max_position_embeddings=32))
    request = GenerationRequest(prompt_of(27), 6)
    result = parity(pair.target, pair.target, request, block_size, scripted(request, 512, oracle))
    assert result.holds
    assert len(result.rounds.tokens) == 6
    assert result.rounds.finish_reason == "length"
    with pytest.raises(RequestError, match="need 33 positions, the model has 32"):
        speculative_decode(pair.target, pair.drafter, replace(request, max_tokens=7), block_size, 0)


def test_a_drafter_survives_output_buffers_that_are_used_again() -> None:
    """A hidden-state buffer that a later call overwrites spoiled every draft from the second on, and no text showed it.

    Both drafters keep one output buffer per matrix, as a replayed graph does. In the spoiled one the next step's
    embedding is written over the vector that the step has yet to read.
    """
    pair = pair_of(TINY)
    assert pair.drafter is not None
    caches = pair.target.new_caches()
    hidden = pair.target.prefill(list(prompt_of(20)), caches)
    shared = pair.target.shared_kv(caches)

    def chain() -> list[torch.Tensor]:
        """The reference: logits of seven steps, every state copied."""
        token, vector, found = 5, hidden.clone(), []
        for _ in range(7):
            logits, vector = pair.drafter.draft_step(token, vector.clone(), shared, shared.length - 1)
            found.append(logits.clone())
            token, vector = int(logits.argmax()), vector.clone()
        return found

    buffers: dict[int, torch.Tensor] = {}
    seen: list[torch.Tensor] = []
    plain = pair.drafter.kernels

    def linear_any(x: torch.Tensor, w: Any) -> torch.Tensor:
        out = plain.linear_any(x, w)
        return buffers.setdefault(id(w), torch.empty_like(out)).copy_(out)

    def argmax(logits: torch.Tensor) -> list[int]:
        seen.append(logits[0].clone())
        return plain.argmax(logits)

    class Scribbling(faults.Delegate):
        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            rows = self.base.embed(ids)
            if id(drafter._post) in buffers:
                buffers[id(drafter._post)].copy_(rows)
            return rows

    drafter = pair.drafter.with_policy(pair.drafter.policy)
    drafter.kernels = dataclasses.replace(plain, linear_any=linear_any, argmax=argmax)

    def depths(target: Any) -> list[bool]:
        """Whether the logits of each depth have the reference's bytes."""
        buffers.clear()
        seen.clear()
        drafter.bind(target)
        drafter.draft(5, hidden, shared, 7)
        return [same_bytes(own, other) for own, other in zip(seen, chain(), strict=True)]

    assert depths(pair.target) == [True] * 7
    assert depths(Scribbling(pair.target))[:2] == [True, False], "the first draft is right, the second is not"


# ---- judging a difference -------------------------------------------------------------------------------------------


def test_the_margin_is_classics_own_at_that_token() -> None:
    """A difference is a tie or a fault; the figure is of the chain that leads there, not of the block."""
    request = GenerationRequest(prompt_of(9, 29), 20)
    target = FakeTarget()
    tokens = classic_decode(target, request, 0).tokens
    rows = []

    class Watched(FakeTarget):
        def perturb(self, logits: torch.Tensor, start: int, mode: str) -> torch.Tensor:
            rows.append(logits[0])
            return logits

    classic_decode(Watched(), request, 0)
    for index in (1, 2, 19):
        best, second = rows[index - 1].topk(2).values.tolist()
        assert margin_at(target, request, tokens, index, 0) == best - second > TIE_MARGIN
    assert margin_at(target, request, tokens, 0, 5) == margin_at(target, request, tokens, 0, 0) > 0
    with pytest.raises(ValueError, match="index 20 is outside"):
        margin_at(target, request, tokens, 20, 0)


def test_the_margin_of_a_tie_is_zero() -> None:
    """The other half: where two tokens share the best logit, the lower id was taken by nothing but its number."""

    class Tie(FakeTarget):
        def perturb(self, logits: torch.Tensor, start: int, mode: str) -> torch.Tensor:
            logits[:, 3] = logits[:, 7] = 5000.0
            return logits

    request = GenerationRequest(prompt_of(9, 29), 5)
    assert margin_at(Tie(), request, classic_decode(Tie(), request, 0).tokens, 3, 0) == 0.0


# ---- attention and streams ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [(1, 9), (-1, 7), (0, 9), (4, 4), (5, 3)], ids=str)
def test_attention_refuses_keys_that_are_not_there(span: tuple[int, int]) -> None:
    """One column too many once raised in one back end and gave wrong numbers in the other: (1, 9) of 8 keys did."""
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((1, 4, 16), (2, 8, 16), (2, 8, 16)))
    assert torch.isfinite(reference.sdpa_rows(q, k, v, [(0, 8)])).all()
    with pytest.raises(ValueError, match="attention: row 0 sees keys"):
        reference.sdpa_rows(q, k, v, [span])


@pytest.mark.parametrize("shape", [(2, 9), (2, 1), (1, 8), (3, 8)], ids=str)
def test_attention_refuses_a_mask_of_another_shape(shape: tuple[int, int]) -> None:
    """A mask of one column or one row broadcasts: every key, or every row, alike."""
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((4, 2, 16), (2, 8, 16), (2, 8, 16)))
    reference.sdpa_unfused(q, k, v, torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="attention: mask"):
        reference.sdpa_unfused(q, k, v, torch.ones(shape, dtype=torch.bool))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(min_size=0, max_size=3), max_size=12), st.text(max_size=6))
def test_streamed_pieces_are_the_whole_text(pieces: list[bytes], tail: str) -> None:
    """Text that is lost or shown twice between two pieces: broken characters, empty tokens, replacement signs."""
    tokens = [*pieces, *(character.encode() for character in tail)]
    decoder = SimpleNamespace(decode=lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace"))
    stream = TextStream(decoder.decode)
    shown = [stream.push(index) for index in range(len(tokens))]
    assert "".join([*shown, stream.finish()]) == decoder.decode(range(len(tokens)))
