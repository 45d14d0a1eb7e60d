"""mlx-lm on MLX: the checkpoint as it is, its own generator, its own caches. On the CPU it tries the path only."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tools.peers import mlx
from tools.peers.decoder import BLOCK_RUNS, BlockRows, Rows


def available(device: str) -> str | None:
    """None, or why not."""
    if find_spec("mlx_lm") is None:
        return "mlx-lm is not installed"
    return mlx.available(device)


def version() -> str:
    """Versions of both packages."""
    return f"mlx-lm {metadata.version('mlx-lm')}, {mlx.version()}"


def load(folder: Path, device: str) -> MlxDecoder:
    """The target of a folder, weights in memory."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.gpu if device.startswith("cuda") else mx.cpu)
    model, _ = load_model(folder)
    mx.eval(model.parameters())
    return MlxDecoder(mx, model)


class MlxDecoder:
    """A model in mlx-lm."""

    note = "its own generator, which queues a step before the last one's token is read"

    def __init__(self, mx: Any, model: Any) -> None:
        self._mx, self._model = mx, model

    def generate(self, ids: Sequence[int], count: int) -> Iterator[int]:
        """Greedy tokens as mlx-lm's `generate_step` gives them out."""
        from mlx_lm.generate import generate_step

        for token, _ in generate_step(self._mx.array(list(ids)), self._model, max_tokens=count):
            yield int(token)

    def block_rows(self, ids: Sequence[int], block: Sequence[int]) -> BlockRows:
        """One prefill, its caches copied for each way."""
        from mlx_lm.models.cache import make_prompt_cache

        mx = self._mx
        prefilled = make_prompt_cache(self._model)
        self._model(mx.array([list(ids)]), cache=prefilled)
        mx.eval([cache.state for cache in prefilled])
        ways, seconds = [], []
        alone = [[token] for token in block]
        for parts in (*[[list(block)]] * BLOCK_RUNS, alone, alone):
            caches = [self._copied(cache) for cache in prefilled]
            began = time.perf_counter()
            found = [self._model(mx.array([part]), cache=caches)[0] for part in parts]
            logits = mx.concatenate(found) if len(found) > 1 else found[0]
            mx.eval(logits)
            seconds.append(time.perf_counter() - began)
            ways.append((self._bytes(logits), tuple(mx.argmax(logits, axis=-1).tolist())))
        (rows, ids_of_rows), (chain, chain_ids), (again, _) = ways[-3:]
        return BlockRows(rows, chain, again, ids_of_rows, chain_ids, tuple(seconds[1:BLOCK_RUNS]))

    def _copied(self, cache: Any) -> Any:
        """A cache of its own: a write into one must not reach the others."""
        made = copy.copy(cache)
        made.keys, made.values = (self._mx.array(part) for part in (cache.keys, cache.values))
        self._mx.eval(made.keys, made.values)
        return made

    def _bytes(self, logits: Any) -> Rows:
        mx = self._mx
        word = {2: mx.uint16, 4: mx.uint32}[logits.dtype.size]
        return np.ascontiguousarray(np.array(logits.view(word))).view(np.uint8)
