"""Attention over the caches: the rows of a step by the kernel that dispatch names, and prefill in blocks.

A step's rows see keys by absolute position, physically cut at the row's own; prefill visits
128 queries at a time, so its memory grows linearly with the prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cache import LayerCache
from engine.dispatch import AttentionKernel
from kernels import Kernels

QUERY_BLOCK = 128
SCORE_BUDGET = 1 << 23
"""Score elements that one prefill block may hold; long contexts take fewer queries at a time."""


def attend_step(
    kernels: Kernels, kernel: AttentionKernel, cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, rows: int
) -> Tensor:
    """Append the first `rows` rows of k and v [n, Hkv, D] and attend q [n, H, D] -> [n, H, D]; other rows are zero."""
    position = cache.length
    cache.write(k[:rows].transpose(0, 1), v[:rows].transpose(0, 1))
    return attend_rows(kernels, kernel, cache, q, position, rows)


def attend_rows(
    kernels: Kernels, kernel: AttentionKernel, cache: LayerCache, q: Tensor, position: int, rows: int
) -> Tensor:
    """Attend the first `rows` rows of q [n, H, D] from `position` on; the cache holds their k and v already."""
    first = cache.first_visible(position)
    kv = cache.rows(first, position + rows)
    spans = [(cache.first_visible(p) - first, p + 1 - first) for p in range(position, position + rows)]
    if kernel == "row":
        return kernels.sdpa_rows(q, kv[0], kv[1], spans, first)
    keys, values = kv.unbind()
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    if kernel == "unfused_row":
        for row, (start, end) in enumerate(spans):
            cut = keys[:, start:end].contiguous(), values[:, start:end].contiguous()
            out[row] = kernels.sdpa_unfused(q[row][:, None].contiguous(), *cut, None)[:, 0]
        return out
    mask = _block_mask(spans, keys.shape[1], q.device)
    out[:rows] = kernels.sdpa_unfused(q[:rows].transpose(0, 1).contiguous(), keys, values, mask).transpose(0, 1)
    return out


def attend_prefill(cache: LayerCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Append n rows and attend them causally, within the window where there is one; q [n, H, D] -> [n, H, D].

    Scores, softmax and sums in fp32, one rounding.
    """
    n, heads, width = q.shape
    position = cache.length
    first = cache.first_visible(position)
    new = torch.stack((k.transpose(0, 1), v.transpose(0, 1)))
    kv = torch.cat((cache.rows(first, position), new), 2) if position > first else new
    cache.write(new[0], new[1])
    keys, values = kv.float()
    groups = keys.shape[0]
    queries = q.float().view(n, groups, heads // groups, width).transpose(0, 1)
    out = torch.empty(groups, n, heads // groups, width, device=q.device)
    block = max(1, min(QUERY_BLOCK, SCORE_BUDGET // (heads * (position + n - first))))
    for begin in range(0, n, block):
        end = min(begin + block, n)
        low = cache.first_visible(position + begin) - first
        high = position + end - first
        spans = [
            (cache.first_visible(p) - first - low, p + 1 - first - low) for p in range(position + begin, position + end)
        ]
        mask = _block_mask(spans, high - low, q.device)
        part = queries[:, begin:end].reshape(groups, -1, width)
        scores = torch.bmm(part, keys[:, low:high].transpose(1, 2)).view(groups, end - begin, -1, high - low)
        scores.masked_fill_(~mask[:, None], float("-inf"))
        weights = torch.softmax(scores, -1).view(groups, -1, high - low)
        out[:, begin:end] = torch.bmm(weights, values[:, low:high]).view(groups, end - begin, -1, width)
    return out.transpose(0, 1).reshape(n, heads, width).to(q.dtype)


def _block_mask(spans: list[tuple[int, int]], count: int, device: torch.device) -> Tensor:
    """bool [M, count], True where a row sees a key."""
    index = torch.arange(count, device=device)
    bounds = torch.tensor(spans, device=device)
    return (index >= bounds[:, :1]) & (index < bounds[:, 1:])
