"""What a verify step leaves for the next round, against the host's own rule."""

from __future__ import annotations

import pytest
import torch
from support_fused import accept

pytest.importorskip("triton", reason="triton is not built for this platform")

from kernels.accept import COLUMNS, accept_rows
from kernels.testing import same_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.mark.parametrize(
    ("rows", "right"),
    [(1, 0), (2, 0), (2, 1), (4, 0), (4, 2), (4, 3), (8, 6), (8, 7)],
)
@pytest.mark.parametrize("width", [64, COLUMNS + 64])
def test_the_device_accepts_what_the_host_accepts(rows: int, right: int, width: int) -> None:
    """None, some and all of a block; what stands past its rows looks right and must not count, nor may a NaN state."""
    generator = torch.Generator().manual_seed(rows)
    best = torch.arange(40, 48, dtype=torch.int32)
    ids = torch.cat((torch.tensor([7], dtype=torch.int32), best[:7]))  # every draft right, past the block too
    if right + 1 < rows:
        ids[1 + right] += 1
    hidden = torch.randn(8, width, generator=generator).to(torch.bfloat16)
    hidden[right, 3] = float("nan")
    found = []
    for rule, device in ((accept, "cpu"), (accept_rows, DEVICE)):
        words = [x.clone().to(device) for x in (ids, best, hidden)]
        position = torch.tensor([500], dtype=torch.int32, device=device)
        draft_position = torch.tensor([499], dtype=torch.int32, device=device)
        vector = torch.zeros(8, width, dtype=torch.bfloat16, device=device)
        rule(*words, position, draft_position, vector, rows)
        found.append([x.cpu() for x in (*words, position, draft_position, vector)])
    for expected, own in zip(*found, strict=True):
        assert same_bytes(expected, own)
    assert int(found[1][3]) == 500 + right + 1
    assert int(found[1][0][0]) == 40 + right


def test_a_block_has_one_to_eight_rows() -> None:
    """A ninth row would be read behind the words."""
    words = [torch.zeros(8, dtype=torch.int32) for _ in range(2)]
    places = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
    states = [torch.zeros(8, 64, dtype=torch.bfloat16) for _ in range(2)]
    for rows in (0, 9):
        with pytest.raises(ValueError, match="a block has 1 to 8"):
            accept_rows(words[0], words[1], states[0], places[0], places[1], states[1], rows)
