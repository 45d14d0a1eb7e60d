"""What a nano pair is worth: held-out loss, agreement per draft step, greedy text and its acceptance.

Agreement is teacher-forced: the text itself stands where drafted tokens would, and a step agrees when the
drafter's choice is the target's choice at that row. Rounds are walked on the target's own greedy text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from tools.nano.model import Attend, Runner, Weights, head, rope_tables
from tools.nano.shape import SLIDING, DraftShape, NanoShape
from tools.nano.train import DRAFT_STEPS, unroll


@dataclass(frozen=True)
class Pair:
    """Dequantized weights of a target and its drafter with their shapes."""

    target_shape: NanoShape
    target: Weights
    draft_shape: DraftShape
    drafter: Weights
    device: str

    def runners(self, length: int) -> tuple[Runner, Runner]:
        """Uncompiled runners with masked attention for sequences up to `length`."""
        attend = Attend(self.target_shape.sliding_window)
        ropes = rope_tables(self.target_shape, length, self.device)
        short = {kind: (cos[: length - DRAFT_STEPS], sin[: length - DRAFT_STEPS]) for kind, (cos, sin) in ropes.items()}
        return Runner(self.target_shape, attend, ropes), Runner(self.draft_shape, attend, short)


def cut(stream: torch.Tensor, length: int, limit: int) -> torch.Tensor:
    """Up to `limit` windows [n, length] spread evenly over a stream."""
    count = min(limit, len(stream) // length)
    starts = torch.linspace(0, len(stream) - length, max(count, 1)).long()
    return stream[starts.unsqueeze(1) + torch.arange(length)].long()


@torch.no_grad()
def hits(pair: Pair, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Agreement of each draft step at each row: ([B, T - 3, 3] bool, next-token losses [B, T - 1] in nats)."""
    tokens = tokens.to(pair.device)
    target, drafter = pair.runners(tokens.shape[1])
    outputs, hidden = unroll(target, drafter, pair.target, pair.drafter, tokens)
    logits = head(hidden, pair.target["model.embed_tokens.weight"], pair.target_shape.softcap).float()
    loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    chosen = logits.argmax(-1)
    length = tokens.shape[1] - DRAFT_STEPS
    agree = [
        head(y, pair.drafter["model.embed_tokens.weight"], None).argmax(-1) == chosen[:, 1 + step : 1 + step + length]
        for step, y in enumerate(outputs)
    ]
    return torch.stack(agree, -1).cpu(), loss.cpu()


def agreement(pair: Pair, stream: torch.Tensor, length: int, limit: int, batch: int = 8) -> dict[str, Any]:
    """Held-out figures of a stream: loss, agreement at each step, tokens per round at block size 4."""
    parts = [hits(pair, rows) for rows in cut(stream, length, limit).split(batch)]
    agree = torch.cat([part[0] for part in parts]).flatten(0, 1).float()
    chain = agree.cumprod(-1)
    return {
        "tokens": agree.shape[0],
        "loss": float(torch.cat([part[1] for part in parts]).mean()),
        "agreement": [float(value) for value in agree.mean(0)],
        "tokens_per_round": 1.0 + float(chain.sum(-1).mean()),
    }


class CachedAttend(Attend):
    """Attention over a growing per-layer cache, one position per batch row; `begin` before each forward."""

    def begin(self, caches: list[tuple[torch.Tensor, torch.Tensor]], positions: torch.Tensor) -> CachedAttend:
        """caches: per layer k, v [B, Hkv, T, D]; positions [B, M] of the rows to come."""
        object.__setattr__(self, "state", [caches, positions, 0])
        return self

    def __call__(self, kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k, v at their positions, then attend to everything visible."""
        caches, positions, layer = self.state  # type: ignore[attr-defined]
        self.state[2] += 1  # type: ignore[attr-defined]
        keys, values = caches[layer]
        index = positions[:, None, :, None].expand_as(k)
        keys.scatter_(2, index, k)
        values.scatter_(2, index, v)
        ahead = positions.unsqueeze(-1) - torch.arange(keys.shape[2], device=q.device)
        seen = (ahead >= 0) & (ahead < self.window) if kind == SLIDING else ahead >= 0
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen.unsqueeze(1), scale=1.0, enable_gqa=True)


@torch.no_grad()
def generate(pair: Pair, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy continuation of `count` tokens for every prompt, stop tokens ignored, all prompts at once."""
    shape, weights, device = pair.target_shape, pair.target, pair.device
    longest = max(map(len, prompts))
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    padded = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(list(prompt))
    dtype = weights["model.norm.weight"].dtype
    caches = []
    for kind in shape.layer_types:
        _, pairs, width = shape.heads(kind)
        size = (len(prompts), pairs, longest + count, width)
        caches.append((torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device)))
    tables = rope_tables(shape, longest + count, device)
    attend = CachedAttend(shape.sliding_window)
    positions = torch.arange(longest, device=device).expand(len(prompts), longest)
    tokens = padded.to(device)
    produced: list[torch.Tensor] = []
    for step in range(count):
        ropes = {kind: (cos[positions], sin[positions]) for kind, (cos, sin) in tables.items()}
        runner = Runner(shape, attend.begin(caches, positions), ropes)
        hidden, _ = runner.target(weights, tokens)
        rows = hidden[torch.arange(len(prompts), device=device), lengths - 1] if step == 0 else hidden[:, -1]
        chosen = head(rows, weights["model.embed_tokens.weight"], shape.softcap).argmax(-1)
        produced.append(chosen)
        tokens, positions = chosen.unsqueeze(1), (lengths + step).unsqueeze(1)
    return torch.stack(produced, 1).cpu().tolist()


def walk(agree: torch.Tensor, first: int, count: int) -> tuple[list[int], int]:
    """Accepted drafts of each round over `count` generated tokens, from agree [T, 3]; also how many were drafted.

    `first` is the row of the last prompt token; the first generated token is the prefill's own.
    """
    accepted: list[int] = []
    emitted = 1
    row = first
    while emitted < count and row < len(agree):
        taken = int(agree[row].int().cumprod(0).sum())
        taken = min(taken, count - emitted - 1) if emitted + taken + 1 > count else taken
        accepted.append(taken)
        emitted += taken + 1
        row += taken + 1
    return accepted, DRAFT_STEPS * len(accepted)


def free_running(pair: Pair, prompts: Sequence[Sequence[int]], count: int, batch: int = 320) -> list[dict[str, Any]]:
    """Per prompt: the greedy tokens, how many are distinct, acceptance length and rate of block size 4."""
    results: list[dict[str, Any]] = []
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch):
        chosen = [prompts[i] for i in order[start : start + batch]]
        texts = generate(pair, chosen, count)
        longest = max(map(len, chosen)) + count + DRAFT_STEPS
        rows = torch.zeros(len(chosen), longest, dtype=torch.long)
        for row, (prompt, text) in enumerate(zip(chosen, texts, strict=True)):
            rows[row, : len(prompt) + count] = torch.tensor([*prompt, *text])
        agree, _ = hits(pair, rows)
        for row, (prompt, text) in enumerate(zip(chosen, texts, strict=True)):
            accepted, drafted = walk(agree[row], len(prompt) - 1, count)
            results.append(
                {
                    "prompt": order[start + row],
                    "tokens": text,
                    "distinct_tokens": len(set(text)),
                    "acceptance_length": 1.0 + sum(accepted) / max(len(accepted), 1),
                    "acceptance_rate": sum(accepted) / max(drafted, 1),
                }
            )
    return sorted(results, key=lambda item: int(item["prompt"]))


def in_dtype(pair: Pair, dtype: torch.dtype) -> Pair:
    """The same pair computing in another dtype."""

    def cast(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.to(dtype) for name, value in weights.items()}

    return replace(pair, target=cast(pair.target), drafter=cast(pair.drafter))
