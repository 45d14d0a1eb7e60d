"""Embeddings from the packed head: the bytes of the dequantized table's rows, whatever the tile they lie in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not built for this platform")

from engine.quantize import dequantize, quantize
from kernels import reference, triton_backend
from kernels.embed import dense_rows, embed_rows
from kernels.launch import LaunchShape
from kernels.repack import PackedWeight, pack_dense, pack_weight
from kernels.testing import same_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = LaunchShape(32, 1, 2, 2, 1)
SCALE = torch.tensor(62.0, dtype=torch.bfloat16, device=DEVICE)
IDS = torch.tensor([3, 69, 0, 31, 32, 64, 7, 7], dtype=torch.int32, device=DEVICE)
"""First and last row, both sides of a tile's edge, and the last tile, which is not full."""


def table(bits: int, rows: int = 70, width: int = 640) -> tuple[PackedWeight, Tensor]:
    """A packed table, and its rows as the loader dequantizes them."""
    dense = torch.randn(rows, width, generator=torch.Generator().manual_seed(bits)).to(torch.bfloat16).to(DEVICE)
    if bits == 16:
        return pack_dense(dense, SHAPE), dense
    stored = quantize(dense, bits)
    return pack_weight(*stored, bits, SHAPE), dequantize(*stored, bits)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_rows_have_the_bytes_of_the_dequantized_table(bits: int) -> None:
    """Every step of the repack undone: tiles, nibbles, scales, the last groups of a row."""
    packed, dense = table(bits)
    expected = reference.embed(dense, IDS.long(), SCALE)
    assert same_bytes(embed_rows(packed, IDS, SCALE, 8), expected)
    out = torch.full((8, 640), 7.0, dtype=torch.bfloat16, device=DEVICE)
    embed_rows(packed, IDS, SCALE, 3, out=out)
    assert same_bytes(out[:3], expected[:3])
    assert bool((out[3:] == 7.0).all())


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_the_dense_matrix_has_the_bytes_of_the_loaders(bits: int) -> None:
    """Prefill multiplies by it, so its K/V would differ from another route's."""
    packed, dense = table(bits)
    assert same_bytes(dense_rows(packed), dense)
    assert same_bytes(triton_backend.dense(packed), dense)


def test_bad_operands_are_refused() -> None:
    """Ids that are not where the kernel reads them, a scale that is not one value."""
    packed, _ = table(4)
    with pytest.raises(ValueError, match=r"embed_rows: ids: expected torch\.int32"):
        embed_rows(packed, IDS.long(), SCALE, 1)
    with pytest.raises(ValueError, match="one bf16 value"):
        embed_rows(packed, IDS, SCALE.float(), 1)
    with pytest.raises(ValueError, match="9 rows of 8 ids"):
        embed_rows(packed, IDS, SCALE, 9)
