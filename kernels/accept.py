"""What a finished verify step leaves for the next round, worked out where it lies: nobody has to look in between."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jit import SLOTS, check_operand, launch_options, wait_for_producers

COLUMNS = 1024


def accept_rows(
    ids: Tensor, best: Tensor, hidden: Tensor, position: Tensor, draft_position: Tensor, vector: Tensor, rows: int
) -> None:
    """Carry on behind the longest prefix of drafts that equals the target's own tokens.

    ids int32 [8] are the block's rows, best int32 [8] its greedy tokens, hidden bf16 [8, H] its states, position
    int32 [1] its first row's. Of `rows` rows a are accepted: ids[0] becomes best[a], position moves on by a + 1,
    draft_position stands one before it, and vector [8, H] gets hidden[a] in row 0.
    """
    for name, words in (("ids", ids), ("best", best)):
        check_operand(f"accept_rows: {name}", words, torch.int32, (SLOTS,))
    for name, words in (("position", position), ("draft_position", draft_position)):
        check_operand(f"accept_rows: {name}", words, torch.int32, (1,))
    check_operand("accept_rows: hidden", hidden, torch.bfloat16, (SLOTS, None))
    check_operand("accept_rows: vector", vector, torch.bfloat16, tuple(hidden.shape))
    if not 1 <= rows <= SLOTS:
        raise ValueError(f"accept_rows: {rows} rows; a block has 1 to {SLOTS}")
    _accept[(1,)](
        ids, best, hidden, position, draft_position, vector, rows, hidden.shape[1], BLOCK=COLUMNS,
        **launch_options(ids.device, 4),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "width"])
def _accept(
    ids_ptr, best_ptr, hidden_ptr, position_ptr, draft_position_ptr, vector_ptr, rows, width, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.arange(0, 8)
    column = tl.arange(0, BLOCK)
    wait_for_producers()
    drafted = tl.load(ids_ptr + 1 + row, mask=row + 1 < rows, other=-1)
    found = tl.load(best_ptr + row, mask=row + 1 < rows, other=-1)
    accepted = tl.min(tl.where((row + 1 < rows) & (drafted != found), row, rows - 1), 0)
    position = tl.load(position_ptr)
    token = tl.load(best_ptr + accepted)
    for start in tl.range(0, width, BLOCK):
        real = start + column < width
        state = tl.load(hidden_ptr + accepted * width + start + column, mask=real, other=0.0)
        tl.store(vector_ptr + start + column, state, mask=real)
    tl.debug_barrier()  # every thread has read the block's words before one of them is overwritten
    tl.store(ids_ptr, token)
    tl.store(position_ptr, position + accepted + 1)
    tl.store(draft_position_ptr, position + accepted)
