"""Sums whose order is written down, for kernels whose fused and plain forms must agree on bytes.

`tl.sum` adds in the order of the layout the compiler picks, and that depends on how the operand was loaded. Here every
step adds two numbers, where order means nothing, so the tree is the same in every kernel, layout and interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def halvings(size: int, goal: int) -> int:
    """How often a power of two is halved to reach a smaller one; none where it is no larger."""
    count = 0
    while size > goal:
        size //= 2
        count += 1
    return count


@triton.jit
def tree_sum(x, SIZE: tl.constexpr):
    """Sum of x fp32 [SIZE], SIZE a power of two, neighbours first: the sum of the lower half plus that of the upper.

    So a row may be cut into slices of a power of two, and the sums of its slices summed by the same tree.
    """
    for step in tl.static_range(halvings(SIZE, 2)):
        x = tl.sum(tl.reshape(x, [SIZE >> (step + 1), 2]), 1)
    return tl.sum(x, 0)


@triton.jit
def tree_sums(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Sum of each row of x fp32 [ROWS, SIZE], SIZE a power of two, neighbours first -> [ROWS]."""
    for step in tl.static_range(halvings(SIZE, 1)):
        x = tl.sum(tl.reshape(x, [ROWS, SIZE >> (step + 1), 2]), 2)
    return tl.reshape(x, [ROWS])
