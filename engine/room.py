"""Room for K/V that outlives a generation, and what was recorded over it.

A recorded step reads and writes the addresses it was recorded with. Caches therefore borrow their buffers from a room
and leave them to the next ones, so that a handful of recordings serves all generations of a process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from engine.cache import CacheSet, LayerCache, LinearCache
from engine.drafts import Drafts
from engine.errors import EngineError
from kernels import MAX_ROWS

T = TypeVar("T")

ROOM_STEP = 4096
"""Rows by which a room's linear caches grow: a recorded step covers every context up to there."""

IDS, POSITION, DRAFT_POSITION, BEST = 0, MAX_ROWS, MAX_ROWS + 4, 2 * MAX_ROWS
"""Where things stand in a room's control words: token ids of a block, positions, and the greedy ids of its rows; each
16 bytes on, since a kernel takes another form for an operand that is not aligned so."""

CONTROL_WORDS = 3 * MAX_ROWS


class Recorder(Protocol):
    """Turns a function over fixed buffers into one that can be run again without its Python."""

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Run it, and give back what runs it again and the result, whose tensors every run fills anew."""


class CudaRecorder:
    """Records CUDA graphs."""

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """A first call outside the capture compiles and loads the kernels, neither of which a capture allows."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()
        return graph.replay, result


class Room:
    """Buffers of all layers, the words that steer a recorded step, and the recordings over both.

    `control` int32 [24] on the device and `sent`, `found` on the host: see IDS, POSITION, DRAFT_POSITION, BEST.
    `vector` [8, H] is the hidden state that the drafter starts from, in row 0; `drafted` names whose tokens stand in
    `control`; `turn` counts how often the host has written there.
    """

    def __init__(self, rooms: Rooms, layers: Sequence[LayerCache], hidden_size: int) -> None:
        self.rooms = rooms
        self.kv = [layer.kv for layer in layers]
        self._growing = next((i for i, layer in enumerate(layers) if isinstance(layer, LinearCache)), None)
        self.recordings: dict[Hashable, Any] = {}
        device, dtype = self.kv[0].device, self.kv[0].dtype
        self.on_gpu = device.type == "cuda"
        self.control = torch.zeros(CONTROL_WORDS, dtype=torch.int32, device=device)
        self.sent = torch.zeros(CONTROL_WORDS, dtype=torch.int32, pin_memory=self.on_gpu)
        self.found = [torch.zeros(CONTROL_WORDS, dtype=torch.int32, pin_memory=self.on_gpu) for _ in range(2)]
        self.vector = torch.zeros(MAX_ROWS, hidden_size, dtype=dtype, device=device)
        self._arrived: list[Any] = []
        self._marks: list[list[Any]] = []
        if self.on_gpu:
            self._arrived = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
            self._marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2)]  # type: ignore[no-untyped-call]
        self.drafted: Drafts | None = None
        self.turn = 0

    @property
    def ids(self) -> Tensor:
        """Token ids of a block int32 [8]."""
        return self.control[IDS:POSITION]

    @property
    def position(self) -> Tensor:
        """Position of the block's first row int32 [1]."""
        return self.control[POSITION : POSITION + 1]

    @property
    def draft_position(self) -> Tensor:
        """Position of the drafter's queries int32 [1]."""
        return self.control[DRAFT_POSITION : DRAFT_POSITION + 1]

    @property
    def best(self) -> Tensor:
        """Greedy ids of a step's rows int32 [8]."""
        return self.control[BEST:]

    def another(self) -> CacheSet:
        """Empty caches in another room of the same kind."""
        return self.rooms.take()

    def fit(self, caches: CacheSet, end: int) -> int:
        """Make the caches hold positions below `end` and say how many they hold; recordings over old buffers go."""
        first = self._growing
        if first is not None and caches[first].kv is self.kv[first] and end <= self.kv[first].shape[2]:
            return self.kv[first].shape[2]  # the layers grow together
        for layer in caches.layers:
            if isinstance(layer, LinearCache):
                layer.make_room(end)
        if any(mine is not layer.kv for mine, layer in zip(self.kv, caches.layers, strict=True)):
            self.kv = [layer.kv for layer in caches.layers]
            self.recordings.clear()
        return min((layer.kv.shape[2] for layer in caches.layers if isinstance(layer, LinearCache)), default=end)

    def recorded(self, key: Hashable, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """The recording under this key, made now where there is none: that runs it once, so words are sent before."""
        found = self.recordings.get(key)
        if found is None:
            words = self.control.clone()
            found = self.recordings[key] = self.rooms.recorder.record(run)
            self.control.copy_(words)  # recording has run it once
        return found

    def send(self, tokens: Sequence[int], position: int) -> None:
        """Put a block's tokens and its position where recorded steps read them; the drafter stands one before."""
        if self.drafted is not None:
            self.drafted.settle()
        self.drafted = None
        self.turn += 1
        words = self.sent.numpy()
        words[IDS : IDS + len(tokens)] = tokens
        words[POSITION], words[DRAFT_POSITION] = position, position - 1
        self.control[:BEST].copy_(self.sent[:BEST], non_blocking=True)

    def check_ahead(self, caches: CacheSet, length: int, turn: int) -> None:
        """EngineError unless a step that ran ahead from this length, after this turn, still belongs to the caches."""
        if caches.length != length or self.turn != turn:
            raise EngineError(
                f"caches: {caches.length} rows are kept, but the next step ran ahead from {length}; "
                "keep what was accepted and take no other step in between, or close the generator first"
            )

    def advance(self) -> None:
        """On the device: the greedy token of row 0 is the next block's first, one position on."""
        self.ids[:1].copy_(self.best[:1])
        self.position.add_(1)

    def fetch(self, slot: int = 0) -> None:
        """Start the control words' way to the host, behind all that was launched so far; two may be on their way."""
        self.found[slot].copy_(self.control, non_blocking=True)
        if self._arrived:
            self._arrived[slot].record()

    def wait(self, slot: int = 0) -> list[int]:
        """The control words of the last `fetch` of this slot, once they are there."""
        if self._arrived:
            self._arrived[slot].synchronize()
        words: list[int] = self.found[slot].tolist()
        return words

    def mark(self, end: int, slot: int = 0) -> None:
        """Remember when the device gets here, at the beginning (0) or the end (1) of a span."""
        if self._marks:
            self._marks[slot][end].record()

    def span(self, slot: int = 0) -> float:
        """Seconds between the last two marks of a slot, once the device has passed them."""
        return self._marks[slot][0].elapsed_time(self._marks[slot][1]) * 1e-3 if self._marks else 0.0


class Rooms:
    """Hands out rooms, each again once its caches are gone."""

    def __init__(self, make: Callable[[], CacheSet], recorder: Recorder, hidden_size: int) -> None:
        self._make, self.recorder, self._hidden_size = make, recorder, hidden_size
        self._plan: list[LayerCache] = []
        self._free: list[Room] = []

    def take(self) -> CacheSet:
        """Empty caches in a free room, or in a new one."""
        room = self._free.pop() if self._free else self._built()
        layers = [layer.emptied(kv) for layer, kv in zip(self._plan, room.kv, strict=True)]
        caches = CacheSet(layers, room)
        # The room is free when the caches are gone and every layer too, since a layer may be held alone.
        lease = _Lease()
        for held in (caches, *layers):
            held.lease = lease  # type: ignore[attr-defined]
        weakref.finalize(lease, self._free.append, room)
        return caches

    @torch.inference_mode(False)
    def _built(self) -> Room:
        """A room outlives whoever asks for it, so its tensors must serve in inference mode and outside of it."""
        layers = self._make().layers
        for layer in layers:
            if isinstance(layer, LinearCache):
                layer.make_room(layer.growth)
        if not self._plan:
            self._plan = [layer.emptied(layer.kv.new_empty(0)) for layer in layers]
        return Room(self, layers, self._hidden_size)


class _Lease:
    """Dies with the last of those that hold it."""
