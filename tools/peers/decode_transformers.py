"""transformers in bf16, eager: the checkpoint dequantized into its own Gemma 4 text model. For scale, not a rival."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint import open_checkpoint
from engine.quantize import GROUP_SIZE, dequantize
from kernels import Weight
from tools.peers.base import needs_cuda
from tools.peers.decoder import BLOCK_RUNS, BlockRows, Rows

SMALL_BYTES = 1 << 30
"""A checkpoint below this may also run on a CPU: that tries the path."""
SLAB_ELEMENTS = 1 << 26
NOT_ARGUMENTS = ("model_type", "enable_moe_block")


def available(device: str) -> str | None:
    """None, or why not."""
    if find_spec("transformers") is None:
        return "transformers is not installed"
    import transformers

    return None if hasattr(transformers, "Gemma4ForCausalLM") else f"{version()} has no Gemma 4"


def version() -> str:
    """Version of the package."""
    return f"transformers {metadata.version('transformers')}, torch {torch.__version__}"


def load(folder: Path, device: str) -> TransformersDecoder:
    """The text model of a folder, every matrix dequantized to bf16 on the device, one at a time."""
    checkpoint = open_checkpoint(folder)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size > SMALL_BYTES and (reason := needs_cuda(device)):
        raise RuntimeError(f"{size / 1e9:.1f} GB of weights, dequantized: {reason}")
    model = _empty(checkpoint.config, device)
    slots: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, entry in checkpoint.entries.items():
        if name.endswith((".scales", ".biases")):
            continue
        slot = slots.pop(f"model.{name}")
        if name.endswith(".weight") and len(entry.shape) == 2:
            _fill(slot.data, checkpoint.weight(name.removesuffix(".weight"), torch.bfloat16, device))
        else:
            slot.data.copy_(checkpoint.tensor(name))
    model.tie_weights()
    left = [name for name in slots if not name.endswith(("lm_head.weight", "inv_freq", "embed_scale"))]
    if left:
        raise RuntimeError(f"the checkpoint has no {left[0]}, which this model needs")
    return TransformersDecoder(model.eval(), device)


def _fill(slot: Tensor, weight: Weight) -> None:
    """The matrix in bf16, dequantized some rows at a time: on the way a row takes ten times its final bytes."""
    stored = weight.stored
    if stored is None:
        slot.copy_(weight.data)
        return
    step = max(SLAB_ELEMENTS // slot.shape[1], 1)
    for first in range(0, slot.shape[0], step):
        part = slice(first, first + step)
        words, scales, biases = stored.words[part], stored.scales[part], stored.biases[part]
        slot[part].copy_(dequantize(words, scales, biases, weight.bits, GROUP_SIZE, slot.dtype))


def _empty(config: Any, device: str) -> Any:
    """The model in bf16 on the device. Not `.to(bfloat16)`: that would round the rotary frequencies as well."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    unified = str(config.get("model_type", "")).startswith("gemma4_unified")
    prefix = "Gemma4Unified" if unified and hasattr(transformers, "Gemma4UnifiedForCausalLM") else "Gemma4"
    values = {key: value for key, value in config["text_config"].items() if key not in NOT_ARGUMENTS}
    text = getattr(transformers, f"{prefix}TextConfig")(**values)
    text._attn_implementation = "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return getattr(transformers, f"{prefix}ForCausalLM")(text)
    finally:
        torch.set_default_dtype(before)


class TransformersDecoder:
    """A model in transformers."""

    note = "bf16 weights, eager: no compilation, no graph; 3.6 times the bytes of 4-bit ones"

    def __init__(self, model: Any, device: str) -> None:
        self._model, self._device = model, device
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_key = "cache" if "cache" in parameters else "past_key_values"  # renamed on the way to 5.40

    def generate(self, ids: Sequence[int], count: int) -> Iterator[int]:
        """Greedy tokens of a plain loop over forwards with its own cache."""
        cache = self._cache()
        token = int(self._logits(ids, cache, last=True).argmax())
        for _ in range(count):
            yield token
            token = int(self._logits([token], cache).argmax())

    def block_rows(self, ids: Sequence[int], block: Sequence[int]) -> BlockRows:
        """One prefill, its cache copied for each way."""
        prefilled = self._cache()
        self._logits(ids, prefilled, last=True)
        ways, seconds = [], []
        alone = [[token] for token in block]
        for parts in (*[[list(block)]] * BLOCK_RUNS, alone, alone):
            cache = copy.deepcopy(prefilled)
            self._wait()
            began = time.perf_counter()
            ways.append(torch.cat([self._logits(part, cache) for part in parts]))
            self._wait()
            seconds.append(time.perf_counter() - began)
        rows, chain, again = ways[-3:]
        ids_of_rows, chain_ids = (tuple(way.argmax(-1).tolist()) for way in (rows, chain))
        timed = tuple(seconds[1:BLOCK_RUNS])
        return BlockRows(_bytes(rows), _bytes(chain), _bytes(again), ids_of_rows, chain_ids, timed)

    def _wait(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.synchronize()

    def _cache(self) -> Any:
        import transformers

        return transformers.DynamicCache(config=self._model.config)

    def _logits(self, ids: Sequence[int], cache: Any, last: bool = False) -> Tensor:
        """Logits [n, V] of the tokens after what the cache holds; of the last one alone if asked for."""
        tokens = torch.tensor([list(ids)], device=self._device)
        with torch.inference_mode():
            options = {self._cache_key: cache, "use_cache": True, "logits_to_keep": 1 if last else 0}
            out = self._model(tokens, **options)
        found: Tensor = out.logits[0]
        return found


def _bytes(logits: Tensor) -> Rows:
    found: Rows = logits.contiguous().view(torch.uint8).cpu().numpy()
    return found
