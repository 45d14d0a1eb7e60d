"""The tests' quicker interpreter: the same results, the language patched once a launch and put back after it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not built for this platform")

import triton
import triton.language as tl
from support_interpreter import patch_once_per_launch
from triton.runtime import interpreter

from kernels.jit import INTERPRETED, round_bf16

pytestmark = pytest.mark.skipif(not INTERPRETED.value, reason="there is a GPU, so nothing is interpreted")


@triton.jit
def _rounded_maxima(x_ptr, out_ptr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for part in tl.static_range(PARTS):
        x = tl.load(x_ptr + part * BLOCK + at)
        tl.store(out_ptr + part, round_bf16(tl.max(x, 0)))


def maxima() -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel computes over twelve blocks, and what it should."""
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    out = torch.empty(12)
    _rounded_maxima[(1,)](x, out, PARTS=12, BLOCK=16)
    return out, x.amax(1).bfloat16().float()


def test_helpers_do_not_patch_the_language_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve nested calls of two helpers, one of them in Triton's own library: not one patch a call, in any launch."""
    patch_once_per_launch()  # a second time changes nothing
    modules: list[object] = []
    patch = interpreter._patch_builtin
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda module, *rest: (modules.append(module), patch(module, *rest))
    )
    for _ in range(2):
        modules.clear()
        out, expected = maxima()
        assert torch.equal(out, expected)
        # by the kernel's own module, and by the first helper of a module that sees tl.core too
        assert 1 <= modules.count(tl) <= 2
        assert modules.count(tl.core) <= 1


def test_the_language_is_its_own_again_after_a_launch() -> None:
    """Otherwise kernels compiled later in the process would see the interpreter's functions."""
    before = tl.reduce, tl.load, tl.static_range, tl.dtype.to_ir
    maxima()
    assert (tl.reduce, tl.load, tl.static_range, tl.dtype.to_ir) == before


def test_a_launch_that_fails_is_over() -> None:
    """The next one must patch again."""
    with pytest.raises(interpreter.InterpreterError):
        _rounded_maxima[(1,)](torch.zeros(16), torch.zeros(1), PARTS=1, BLOCK=15)
    out, expected = maxima()
    assert torch.equal(out, expected)
