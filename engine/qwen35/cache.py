"""Caches of a Qwen 3.5 sequence: K/V rows of the full layers, states of the linear ones, and what the drafter knows.

A linear layer's state after each row of the last steps is kept, so that dropping rejected rows gives back the very
tensor that was there: nothing is recomputed, and no byte can differ.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from engine.cache import CacheSet, LinearCache
from engine.errors import EngineError
from engine.qwen35.config import Qwen35Config
from kernels import MAX_ROWS


class StateSnapshot(NamedTuple):
    """The logical content of a linear layer: rows seen, and the bytes of the convolution's past and of the state."""

    length: int
    conv: bytes
    state: bytes


class StateCache:
    """One linear layer: the state fp32 [Hv, Dk, Dv] and the convolution's last K - 1 inputs [K - 1, C].

    Both are kept for each of the last 8 rows as well, so that a block can be rolled back. A kept tensor is never
    written to again: clones share it.
    """

    def __init__(self, config: Qwen35Config, dtype: torch.dtype, device: str = "cpu") -> None:
        heads, keys, values = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        self.past = config.linear_conv_kernel_dim - 1
        self.length = 0
        self._inputs = torch.zeros(self.past, config.conv_width, dtype=dtype, device=device)
        self._states = [torch.zeros(heads, keys, values, dtype=torch.float32, device=device)]

    @property
    def state(self) -> Tensor:
        """The state after the newest row; read only."""
        return self._states[-1]

    def conv_inputs(self, rows: Tensor) -> Tensor:
        """What a convolution over new rows [n, C] sees: the K - 1 inputs before them, and they [K - 1 + n, C]."""
        return torch.cat((self._inputs[-self.past :], rows))

    def append(self, inputs: Tensor, states: Sequence[Tensor]) -> None:
        """Keep the convolution inputs [n, C] of a step's rows and the state after each of them."""
        if inputs.shape[0] != len(states):
            raise EngineError(f"state cache: {inputs.shape[0]} rows of inputs, {len(states)} states")
        self._inputs = torch.cat((self._inputs, inputs))[-(self.past + MAX_ROWS) :]
        self._states = [*self._states, *states][-(MAX_ROWS + 1) :]
        self.length += len(states)

    def replace(self, inputs: Tensor, state: Tensor) -> None:
        """Take over after a prefill of inputs [n, C] that ends in `state`; it cannot be rolled back."""
        self._inputs = self.conv_inputs(inputs)[-self.past :].clone()
        self._states = [state]
        self.length += inputs.shape[0]

    def reserve(self, count: int) -> None:
        """EngineError: a state follows from its inputs, there is no row to be written later."""
        raise EngineError(f"state cache: cannot reserve {count} rows")

    def rollback(self, n: int) -> None:
        """Drop the newest n rows; EngineError past the rows of the last steps, at most 8."""
        if not 0 <= n < len(self._states):
            held = len(self._states) - 1
            raise EngineError(f"state cache: cannot roll back {n} rows, the states before {held} rows are kept")
        if n:
            self._inputs, self._states = self._inputs[:-n], self._states[:-n]
            self.length -= n

    def clone(self) -> Self:
        """An independent copy; the tensors are shared, since none is written to again."""
        return copy.copy(self)

    def snapshot(self) -> StateSnapshot:
        """The logical content; how many older states are kept does not show."""
        return StateSnapshot(self.length, _bytes(self._inputs[-self.past :]), _bytes(self.state))

    def committed(self) -> Tensor:
        """The logical content as bits int32 [n]: the convolution's past, then the state."""
        past = self._inputs[-self.past :].contiguous().view(torch.uint8).flatten()
        state = self.state.contiguous().view(torch.uint8).flatten()
        return torch.cat((past, state)).view(torch.int32)

    @property
    def nbytes(self) -> int:
        """Bytes held, the states of the last rows included."""
        return sum(x.numel() * x.element_size() for x in (self._inputs, *self._states))


class DraftContext:
    """What a DFlash drafter knows of one sequence: its own K/V of the rows it has read, and taps that it has not.

    Taps are hidden states of several target layers side by side, [n, layers * H]. The drafter reads them when it
    drafts, and only its K/V stay.
    """

    def __init__(self) -> None:
        self.kv: list[LinearCache] = []
        self._taps: list[Tensor] = []

    @property
    def read(self) -> int:
        """Rows whose K/V the drafter has."""
        return self.kv[0].length if self.kv else 0

    @property
    def length(self) -> int:
        """Rows from position 0 that are read or waiting."""
        return self.read + sum(taps.shape[0] for taps in self._taps)

    def add(self, position: int, taps: Tensor) -> None:
        """Keep the taps of rows from `position` on; ignored after a gap, which `take` then reports."""
        if position == self.length:
            self._taps.append(taps)

    def take(self, length: int) -> Tensor | None:
        """The waiting taps [n, layers * H] of a sequence of `length` rows, handed over once; None when there are none.

        EngineError when some rows were never tapped: classic decode keeps none.
        """
        if self.length != length:
            raise EngineError(
                f"drafter: {length} rows are committed, hidden states of {self.length} were kept; "
                "rounds cannot go on where classic decode has run"
            )
        taps, self._taps = self._taps, []
        return torch.cat(taps) if taps else None

    def cut(self, length: int) -> None:
        """Forget rows from position `length` on."""
        for layer in self.kv:
            layer.rollback(max(0, layer.length - length))
        while self._taps and self.length > length:
            surplus = self.length - length
            last = self._taps.pop()
            if last.shape[0] > surplus:
                self._taps.append(last[:-surplus])

    def clone(self) -> DraftContext:
        """An independent copy."""
        other = DraftContext()
        other.kv, other._taps = [layer.clone() for layer in self.kv], list(self._taps)
        return other


class Qwen35Caches(CacheSet[LinearCache | StateCache]):
    """The caches of all layers, kept at one length, and the drafter's context with them."""

    def __init__(self, layers: Sequence[LinearCache | StateCache]) -> None:
        super().__init__(layers)
        self.context = DraftContext()

    def kv(self, layer: int) -> LinearCache:
        """The cache of a full layer."""
        found = self.layers[layer]
        assert isinstance(found, LinearCache)
        return found

    def state(self, layer: int) -> StateCache:
        """The cache of a linear layer."""
        found = self.layers[layer]
        assert isinstance(found, StateCache)
        return found

    def rollback(self, n: int) -> None:
        """Drop the newest n rows of every layer, and of the drafter's context."""
        super().rollback(n)
        self.context.cut(self.length)

    def clone(self) -> Self:
        """An independent copy."""
        other = super().clone()
        other.context = self.context.clone()
        return other


def new_caches(config: Qwen35Config, dtype: torch.dtype, device: str = "cpu") -> Qwen35Caches:
    """Empty caches for a target: K/V per full layer, a state per linear one."""
    layers: list[LinearCache | StateCache] = []
    for kind in config.kinds:
        if kind == "full":
            layers.append(LinearCache(config.num_key_value_heads, config.head_dim, dtype, device))
        else:
            layers.append(StateCache(config, dtype, device))
    return Qwen35Caches(layers)


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).cpu().numpy().tobytes()
