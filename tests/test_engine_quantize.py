"""engine.quantize against `mx.quantize`: the same bytes for codes, scales and biases, whatever the values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.quantize import affine_codes, dequantize, fake_quantize, pack, quantize, unpack

CLIPPED_STEP = 1.0  # half a step inside the range; the far end may be clipped by another half
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = [(1, 64), (3, 128), (7, 192), (2, 320), (33, 64)]
KINDS = (
    "normal", "positive", "negative", "zeros", "constant", "whole", "sparse", "tiny", "huge", "one_outlier",
    "symmetric", "minus_zero", "below_min_scale", "ramp",
)  # fmt: skip


def sample(kind: str, shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Values of a kind, fp32."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator)
    if kind == "ramp":
        return torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) / 7 - 5
    if kind == "one_outlier":
        base[:, 5] = -900.0
        return base
    if kind == "symmetric":
        return torch.where(base > 0, 1.5, -1.5)
    return {
        "normal": base,
        "positive": base.abs() + 0.1,
        "negative": -base.abs() - 0.1,
        "zeros": base * 0,
        "constant": torch.full(shape, float(base[0, 0])),
        "whole": (base * 3).round(),
        "sparse": base * (torch.rand(shape, generator=generator) < 0.1),
        "tiny": base * 1e-6,
        "huge": base * 1e6,
        "minus_zero": torch.full(shape, -0.0),
        "below_min_scale": base * 1e-9,
    }[kind]


def mlx_quantize(weight: torch.Tensor, bits: int) -> list[np.ndarray]:
    """mx.quantize's three results as unsigned integer views."""
    mx = pytest.importorskip("mlx.core", reason="mlx is the format's own implementation (pip install '.[test]')")
    if weight.dtype == torch.bfloat16:
        array = mx.array(weight.view(torch.uint16).numpy()).view(mx.bfloat16)
    else:
        array = mx.array(weight.numpy())
    packed, scales, biases = mx.quantize(array, group_size=64, bits=bits)
    view = mx.uint16 if weight.dtype == torch.bfloat16 else mx.uint32
    return [np.array(packed), np.array(scales.view(view)), np.array(biases.view(view))]


def as_integers(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor as unsigned integers of its own width."""
    if tensor.element_size() == 2:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.view(torch.int32).numpy().view(np.uint32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_equal_mlx(kind: str, dtype: torch.dtype, bits: int) -> None:
    """A scale rounded before the codes are taken, or a sign lost at an edge group, changes codes by one."""
    for seed, shape in enumerate(SHAPES):
        weight = sample(kind, shape, seed).to(dtype)
        ours = quantize(weight, bits)
        for name, mine, theirs in zip(("codes", "scales", "biases"), ours, mlx_quantize(weight, bits), strict=True):
            assert np.array_equal(as_integers(mine), theirs), f"{name} differ at {shape} {kind}"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_bytes_equal_mlx_over_many_scales(dtype: torch.dtype, bits: int) -> None:
    """A rule that only holds near 1 (fused multiply, another rounding of halves) fails on some magnitude."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(60):
        magnitude = 10 ** float(torch.randn(1, generator=generator) * 2)
        weight = (torch.randn(5, 128, generator=generator) * magnitude).to(dtype)
        for mine, theirs in zip(quantize(weight, bits), mlx_quantize(weight, bits), strict=True):
            assert np.array_equal(as_integers(mine), theirs)


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantize_is_scale_times_code_plus_bias_rounded_once(bits: int) -> None:
    """Two roundings (product, then sum) would differ from the fp64 value rounded once."""
    weight = sample("normal", (9, 192), 3).bfloat16()
    packed, scales, biases = quantize(weight, bits)
    codes = unpack(packed, bits).double().unflatten(-1, (-1, 64))
    exact = (scales.double().unsqueeze(-1) * codes + biases.double().unsqueeze(-1)).flatten(1)
    assert torch.equal(dequantize(packed, scales, biases, bits, dtype=torch.float32).double(), exact)
    assert torch.equal(
        dequantize(packed, scales, biases, bits).view(torch.int16), exact.float().bfloat16().view(torch.int16)
    )


@pytest.mark.parametrize(("bits", "levels"), [(4, 15), (8, 255)])
def test_dequantized_weights_are_close(bits: int, levels: int) -> None:
    """Codes packed in another order give weights of the right size in the wrong places."""
    weight = sample("normal", (13, 256), 4)
    packed, scales, biases = quantize(weight, bits)
    back = dequantize(packed, scales, biases, bits, dtype=torch.float32)
    groups = weight.unflatten(-1, (-1, 64))
    step = (groups.amax(-1) - groups.amin(-1)) / levels
    worst = (back - weight).abs().unflatten(-1, (-1, 64)).amax(-1)
    assert bool((worst <= CLIPPED_STEP * step).all())


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_words_read_as_signed_or_unsigned(bits: int) -> None:
    """A file read as int32 must give the same codes: the top code sets the sign bit."""
    codes = torch.randint(0, 2**bits, (5, 96), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    codes[0, :] = 2**bits - 1
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint32
    assert packed.shape == (5, 96 * bits // 32)
    assert torch.equal(unpack(packed, bits), codes)
    assert torch.equal(unpack(packed.view(torch.int32), bits), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_fake_quantize_is_what_a_checkpoint_gives_back(bits: int) -> None:
    """Training against other weights than the exported ones wastes the quantization-aware phase."""
    weight = sample("normal", (6, 128), 6)
    restored = dequantize(*quantize(weight.bfloat16(), bits), bits, dtype=torch.float32)
    assert torch.equal(fake_quantize(weight, bits).view(torch.int32), restored.view(torch.int32))


def test_zero_stays_zero() -> None:
    """Zero padding in a grown model must dequantize to exactly zero."""
    weight = sample("normal", (4, 64), 7)
    weight[:, ::3] = 0
    for bits in (4, 8):
        back = dequantize(*quantize(weight, bits), bits, dtype=torch.float32)
        assert bool((back[:, ::3].abs() < 1e-6).all())
    codes, _, bias = affine_codes(torch.zeros(1, 64), 4)
    assert int(codes.sum()) == 0
    assert float(bias[0, 0]) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(torch.zeros(2, 64), 3), "bits 3 not supported"),
        (lambda: quantize(torch.zeros(2, 65), 4), "no multiple of the group size 64"),
        (lambda: quantize(torch.zeros(2, 0), 4), "0 columns"),
        (lambda: quantize(torch.zeros(64), 4), "float matrix"),
        (lambda: quantize(torch.zeros(2, 64, dtype=torch.int32), 4), "float matrix"),
        (lambda: quantize(torch.zeros(2, 64), 4, group_size=20), "group size 20"),
        (
            lambda: dequantize(torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 2), torch.zeros(2, 2), 4),
            "8 words of 4 bits are 64 columns",
        ),
        (
            lambda: dequantize(torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 1), torch.zeros(2, 2), 4),
            "do not belong together",
        ),
        (
            lambda: dequantize(torch.zeros(3, 8, dtype=torch.int32), torch.zeros(2, 1), torch.zeros(2, 1), 4),
            "do not belong together",
        ),
    ],
    ids=["bits", "odd_k", "empty", "vector", "integers", "group", "wrong_bits", "biases", "rows"],
)
def test_bad_arguments_say_what_is_wrong(call: object, message: str) -> None:
    """Broadcasting would hide a shape that does not fit."""
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
