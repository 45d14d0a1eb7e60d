"""Checkpoints written by mlx-lm, and MLX itself as the reader of ours: the format oracle.

mlx-lm quantizes a random bf16 model to mixed 4 and 8 bit and saves it; the engine loads that folder and agrees with
MLX in fp32. The other way round, our quantized folder holds the very bytes that mlx-lm writes.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

mx = pytest.importorskip("mlx.core", reason="mlx, the format oracle, is not installed")
mlx_utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm, the format oracle, is not installed")

from support_engine import (  # noqa: E402
    TINY,
    TINY_31B,
    Geometry,
    one_thread,
    random_pair_dirs,
    read_config,
    read_tensors,
    scratch_folder,
)

from engine.dispatch import DispatchPolicy  # noqa: E402
from engine.pair import Pair, load_pair  # noqa: E402

LOGITS_ATOL = 1e-3
"""fp32 on both sides, sums in another order and MLX's fast tanh and exp."""

SEED = 3
RECIPES: Mapping[str, Mapping[str, int]] = {
    "mlp8": {"mlp": 8, "default": 4},
    "uniform4": {"default": 4},
    "uniform8": {"default": 8},
    "embed8": {"embed_tokens": 8, "o_proj": 8, "default": 4},
}
CASES = [
    (TINY, "mlp8"),
    (TINY_31B, "uniform4"),
    (TINY_31B, "uniform8"),
    (TINY, "embed8"),
]
TEXT = (2, *(random.Random(5).randrange(3, 512) for _ in range(47)))
"""Three windows of 16 long."""


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def bits_of(path: str, recipe: Mapping[str, int]) -> int:
    """Bits of a module under a recipe."""
    return next((bits for part, bits in recipe.items() if part != "default" and part in path), recipe["default"])


@functools.cache
def written_by_mlx(geometry: Geometry, recipe_name: str) -> Path:
    """A folder that mlx-lm quantized and saved."""
    recipe = RECIPES[recipe_name]
    source = random_pair_dirs(SEED, geometry, target_bits=None).target
    model, config = mlx_utils.load_model(source)

    def predicate(path: str, module: Any) -> Any:
        bits = bits_of(path, recipe)
        return True if bits == recipe["default"] else {"group_size": 64, "bits": bits}

    model, config = mlx_utils.quantize_model(model, config, 64, recipe["default"], quant_predicate=predicate)
    folder = Path(tempfile.mkdtemp(prefix=f"mlx-{geometry.name}-", dir=scratch_folder())) / recipe_name
    mlx_utils.save_model(folder, model)
    mlx_utils.save_config(config, folder / "config.json")
    return folder


def mlx_model(folder: Path) -> Any:
    """The folder's model in MLX, activations and scales in fp32."""
    model, _ = mlx_utils.load_model(folder)
    model.set_dtype(mx.float32)
    return model


def mlx_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of an uncached forward [n, V]."""
    return torch.tensor(model(mx.array([list(tokens)]))[0].tolist())


def ours(folder: Path) -> Pair:
    """The folder loaded by the engine in fp32, without a drafter."""
    return load_pair(folder, None, DispatchPolicy(), dtype=torch.float32)


@pytest.mark.parametrize(("geometry", "recipe"), CASES, ids=lambda value: getattr(value, "name", value))
def test_checkpoint_written_by_mlx_lm_matches_mlx(geometry: Geometry, recipe: str) -> None:
    """Guards per-module bits, packing order, signed scales, the quantized table as lookup and as head."""
    folder = written_by_mlx(geometry, recipe)
    model = mlx_model(folder)
    target = ours(folder).target
    theirs = mlx_logits(model, TEXT)
    caches = target.new_caches()
    hidden = target.prefill(TEXT[:10], caches)
    rows = [target.logits(hidden[None])]
    rows += [target.step(TEXT[start : start + 3], caches, "verify").logits for start in range(10, len(TEXT), 3)]
    mine = torch.cat(rows)
    assert mine.shape == theirs[9:].shape
    worst = (mine - theirs[9:]).abs().max().item()
    assert worst <= LOGITS_ATOL, f"logits differ by {worst:.2e}"
    assert theirs.std() > 1.0


@pytest.mark.parametrize(("geometry", "recipe"), CASES, ids=lambda value: getattr(value, "name", value))
def test_our_checkpoint_has_the_bytes_that_mlx_lm_writes(geometry: Geometry, recipe: str) -> None:
    """Guards the quantizer and the builder that other tests stand on: same names, dtypes, bytes and config block."""
    theirs = read_tensors(written_by_mlx(geometry, recipe))
    own = random_pair_dirs(SEED, geometry, target_bits=RECIPES[recipe]).target
    mine = read_tensors(own)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert read_config(own)["quantization"] == read_config(written_by_mlx(geometry, recipe))["quantization"]


def test_stored_bits_matter() -> None:
    """Guards the oracle's power: 4 bit and 8 bit of the same weights are apart by far more than the tolerance."""
    four, eight = (mlx_logits(mlx_model(written_by_mlx(TINY_31B, name)), TEXT) for name in ("uniform4", "uniform8"))
    assert (four - eight).abs().max() > 100 * LOGITS_ATOL
