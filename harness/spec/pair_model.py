"""What a spec says about its pair: two checkpoints, how the drafter proposes, the block size."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from harness.spec.base import Model

MtpBlockSize = Annotated[int, Field(ge=2, le=8)]


class Grow(Model):
    """Build the checkpoint from the nano pair in the geometry of a larger model."""

    grow: Literal["12b", "31b"]
    """Geometry to grow the nano pair into, where the machine can."""


class CheckpointRef(Model):
    """Where a checkpoint folder is, and what to do without it."""

    path: Annotated[str, Field(min_length=1)]
    """Checkpoint folder: looked for beside the spec first, then under $HARNESS_MODELS. Never absolute."""
    otherwise: Grow | None = None
    """What to do when the folder is missing. Without it the cases are skipped with the reason."""


class Pair(Model):
    """A target and its drafter."""

    target: CheckpointRef
    """The big model; its output is the law."""
    drafter: CheckpointRef
    """The assistant that proposes tokens."""
    kind: Literal["mtp", "dflash"] = "mtp"
    """How it drafts: `mtp` token by token from hidden state and K/V, `dflash` a block at once from several layers."""
    block_size: MtpBlockSize = 4
    """Rows in one verify forward: the carried token plus block_size - 1 drafts."""
