"""The Gemma 4 text target: prefill, one step of 1 to 8 rows, and the K/V that a drafter reads.

A step computes 8 rows whatever it was asked for, so classic decode and verify run the same shapes; the
dispatch policy says which kernel each op takes, and that is all that tells a stage from another.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.attention import attend_prefill, attend_rows, attend_step
from engine.cache import CacheSet, new_caches
from engine.capture import FINAL_KIND, Capture
from engine.checkpoint import Checkpoint
from engine.config import TargetConfig
from engine.dispatch import DispatchPolicy
from engine.drafts import DraftedBlock
from engine.errors import EngineError
from engine.fused import Choice, FusedOutput, FusedWeights, Tables, fused_step, tables_upto
from engine.kv import LentKV, SharedKV
from engine.layers import LayerWeights, Run, padded_ids, rope_tables, run_layer
from engine.room import BEST, IDS, ROOM_STEP, CudaRecorder, Recorder, Room, Rooms
from engine.weights import layer_weights, target_tensors
from kernels import MAX_ROWS, Kernels, Linear, kernels_for

StepMode = Literal["classic", "verify"]


@dataclass(frozen=True)
class StepOutput:
    """One forward of M rows: logits [M, V] after the soft cap, hidden [M, H] after the final norm, greedy ids."""

    logits: Tensor
    hidden: Tensor
    argmax: list[int]


class Target:
    """A loaded target. Weights are shared between copies that differ in policy or kernels."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: TargetConfig,
        policy: DispatchPolicy,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        kernels: Kernels | None = None,
    ) -> None:
        checkpoint.verify(target_tensors(config), role="target")
        self.config, self.policy, self.device, self.dtype = config, policy, device, dtype
        self.kernels = kernels or kernels_for(policy.backend)
        self._shapes = config.layers
        self._layers: list[LayerWeights] = [
            layer_weights(checkpoint, self.kernels, f"layers.{index}", shape, dtype, device, values=True)
            for index, shape in enumerate(self._shapes)
        ]
        table = checkpoint.weight("embed_tokens", dtype, device)
        self._head = self.kernels.prepare(table)
        self._embedding = self.kernels.table(table, self._head)
        self.embed_scale = torch.tensor(math.sqrt(config.hidden_size), dtype=dtype, device=device)
        self._norm = checkpoint.tensor("norm.weight").float().to(device)
        self._tables = rope_tables(config, device)
        self._mlp_bits = {layer.gate_up.bits for layer in self._layers}
        self._fused = FusedWeights(
            shapes=tuple(self._shapes),
            layers=tuple(self._layers),
            head=self._head,
            final_norm=self._norm,
            embed_scale=self.embed_scale,
            window=config.sliding_window,
            eps=config.rms_norm_eps,
            softcap=config.final_logit_softcapping,
        )
        self._rooms: Rooms | None = None
        if device.startswith("cuda") and policy.flags.use_cuda_graphs:
            self.record_steps(CudaRecorder())

    def record_steps(self, recorder: Recorder, growth: int = ROOM_STEP) -> None:
        """From now on give caches a room, and run a step that has fused ops as a recording over it.

        A room's linear caches start with `growth` rows and grow by as many.
        """
        config, dtype, device = self.config, self.dtype, self.device
        self._rooms = Rooms(lambda: new_caches(config, dtype, device, growth), recorder, config.hidden_size)

    def with_policy(self, policy: DispatchPolicy) -> Target:
        """The same weights under another policy."""
        other = copy.copy(self)
        other.policy = policy
        if policy.backend != self.policy.backend:
            raise EngineError(f"target: loaded for backend {self.policy.backend}, load it again for {policy.backend}")
        return other

    def with_kernels(self, kernels: Kernels) -> Target:
        """The same weights computed by another bundle of the same backend."""
        other = copy.copy(self)
        other.kernels = kernels
        return other

    def linear_weights(self) -> Iterator[tuple[str, Linear]]:
        """Every matrix of the verify path, by name."""
        for index, layer in enumerate(self._layers):
            qkv = "q_proj+k_proj" if self._shapes[index].k_eq_v else "q_proj+k_proj+v_proj"
            yield f"layer {index} {qkv}", layer.qkv
            yield f"layer {index} o_proj", layer.o
            yield f"layer {index} gate_proj+up_proj", layer.gate_up
            yield f"layer {index} down_proj", layer.down
        yield "LM head", self._head

    @property
    def head(self) -> Linear:
        """The tied table as the backend holds it."""
        return self._head

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices as their products read them."""
        return sum(w.nbytes for _, w in self.linear_weights())

    def new_caches(self) -> CacheSet:
        """Empty caches."""
        if self._rooms is not None and self.kernels.fused is not None:
            return self._rooms.take()
        return new_caches(self.config, self.dtype, self.device)

    def embed(self, ids: Tensor) -> Tensor:
        """Scaled embeddings [n, H] of ids [n]."""
        return self.kernels.embed(self._embedding, ids, self.embed_scale)

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], caches: CacheSet, capture: Capture | None = None) -> Tensor:
        """Append one range of a prompt; the last row's hidden state [H] after the final norm."""
        n = len(tokens)
        if n == 0:
            raise EngineError("prefill: no tokens; a range of a prompt has at least one")
        run = Run(
            kernels=self.kernels,
            rows=n,
            linear=self.kernels.linear_any,
            geglu=lambda bits: self.policy.geglu(1, bits, True),
            rope="row",
            tables={kind: table.rows(caches.length, n) for kind, table in self._tables.items()},
            attend=lambda layer, q, k, v: attend_prefill(caches[layer], q, k, v),
            capture=capture,
        )
        h = self._layers_over(run, self.embed(torch.tensor(list(tokens), device=self.device)))
        return self.kernels.rmsnorm(h[-1:], self._norm, self.config.rms_norm_eps)[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [r, V] of up to 8 final-normed rows [r, H], after the soft cap."""
        rows = hidden.shape[0]
        padded = hidden.new_zeros(MAX_ROWS, hidden.shape[1])
        padded[:rows] = hidden
        return self._capped(self._linear(rows)(padded, self._head)[:rows])

    @torch.inference_mode()
    def step(
        self, tokens: Sequence[int], caches: CacheSet, mode: StepMode, capture: Capture | None = None
    ) -> StepOutput:
        """Append 1 to 8 rows. `classic` takes one row and decode's kernels whatever the stage."""
        rows, decode = len(tokens), mode == "classic"
        if not 1 <= rows <= (1 if decode else MAX_ROWS):
            raise EngineError(f"step: {rows} rows in mode {mode}; classic takes 1, verify 1 to {MAX_ROWS}")
        policy = self.policy
        if capture is None and self._fusable(rows, decode):
            return self._fused_step(tokens, caches, decode)
        choice = {kind: policy.attention(rows, kind, decode) for kind in self._tables}
        run = Run(
            kernels=self.kernels,
            rows=rows,
            linear=self._linear(rows),
            geglu=lambda bits: policy.geglu(rows, bits, decode),
            rope=policy.rope(rows, decode),
            tables={kind: table.rows(caches.length, MAX_ROWS) for kind, table in self._tables.items()},
            attend=lambda layer, q, k, v: attend_step(
                self.kernels, choice[self._shapes[layer].kind], caches[layer], q, k, v, rows
            ),
            capture=capture,
        )
        h = self._layers_over(run, self.embed(padded_ids(list(tokens), self.device)))
        hidden = self.kernels.rmsnorm(h, self._norm, self.config.rms_norm_eps)
        logits = self._capped(run.linear(hidden, self._head)[:rows])
        if capture is not None:
            capture.record(len(self._layers), FINAL_KIND, "final norm", hidden[:rows])
            capture.record(len(self._layers), FINAL_KIND, "LM head", logits)
        return StepOutput(logits, hidden[:rows], self.kernels.argmax(logits))

    def _fusable(self, rows: int, decode: bool) -> bool:
        """Whether this step takes decode's kernels around its attention, so that the fused ones have its bytes."""
        return self.kernels.fused is not None and self.policy.rope(rows, decode) == "row"

    def _choice(self, rows: int, decode: bool) -> Choice:
        """What dispatch decides for a step that has fused ops."""
        policy = self.policy
        geglu = {bits: policy.geglu(rows, bits, decode) == "fused" for bits in self._mlp_bits}
        apart = frozenset(kind for kind in self._tables if policy.attention(rows, kind, decode) != "row")
        return Choice(policy.linear(rows) == "per_row", geglu, apart)

    def _recorded(self, rows: int, decode: bool, caches: CacheSet) -> Room | None:
        """The room over which a step of so many rows runs as a recording, or None."""
        recordable = self._fusable(rows, decode) and not self._choice(rows, decode).apart
        return caches.room if self.policy.flags.use_cuda_graphs and recordable else None

    def _fused_step(self, tokens: Sequence[int], caches: CacheSet, decode: bool) -> StepOutput:
        """The same step in few launches, as a recording where the caches have a room."""
        rows, choice = len(tokens), self._choice(len(tokens), decode)
        room = self._recorded(rows, decode, caches)
        if room is not None:
            return self._recorded_step(tokens, caches, room, choice)
        first = caches.length
        caches.reserve(rows)
        ids = padded_ids(list(tokens), self.device).int()
        position = torch.full((1,), first, dtype=torch.int32, device=self.device)
        kv = [layer.kv for layer in caches.layers]
        tables = tables_upto(self._tables, first + MAX_ROWS)

        def apart(layer: int, q: Tensor) -> Tensor:
            kernel = self.policy.attention(rows, self._shapes[layer].kind, decode)
            return attend_rows(self.kernels, kernel, caches[layer], q, first, rows)

        found = self._launch(choice, ids, position, rows, kv, tables, first + rows, apart)
        return StepOutput(found.logits[:rows], found.hidden[:rows], found.ids[:rows].tolist())

    def recorded_verify(self, caches: CacheSet, rows: int, max_keys: int) -> tuple[Callable[[], None], FusedOutput]:
        """What runs a verify step of so many rows over the room of these caches, and where it leaves its results."""
        assert caches.room is not None
        return self._recording(caches.room, self._choice(rows, False), rows, max_keys, False)

    def runs_ahead(self, caches: CacheSet, rows: int) -> bool:
        """Whether verify steps of so many rows over these caches are recordings."""
        return self._recorded(rows, False, caches) is not None

    def _recording(
        self, room: Room, choice: Choice, rows: int, max_keys: int, advance: bool
    ) -> tuple[Callable[[], None], FusedOutput]:
        """A step over a room's buffers for every context that they hold; with `advance`, of the token just found."""

        def run() -> tuple[FusedOutput, Tables]:
            if advance:
                room.advance()
            tables = tables_upto(self._tables, max_keys + MAX_ROWS)
            found = self._launch(choice, room.ids, room.position, rows, room.kv, tables, max_keys)
            room.best.copy_(found.ids)
            return found, tables  # the recording reads the tables, so it keeps them

        geglu = tuple(sorted(choice.fused_geglu.items()))
        replay, (found, _) = room.recorded(("step", rows, choice.per_row, geglu, advance, self.kernels.fused), run)
        return replay, found

    def _recorded_step(self, tokens: Sequence[int], caches: CacheSet, room: Room, choice: Choice) -> StepOutput:
        """Run the recording of a step of so many rows."""
        rows, first = len(tokens), caches.length
        max_keys = room.fit(caches, first + rows)
        drafts = tokens.drafts if isinstance(tokens, DraftedBlock) else None
        if drafts is None or room.drafted is not drafts or drafts.position != first:
            room.send(list(tokens), first)
        replay, found = self._recording(room, choice, rows, max_keys, False)
        replay()
        room.fetch()
        # Copies: the recording's next run fills its own results anew.
        logits, hidden = found.logits[:rows].clone(), found.hidden[:rows].clone()
        caches.reserve(rows)
        words = room.wait()
        if drafts is not None:
            drafts.found(words[IDS + 1 : IDS + rows])
        return StepOutput(logits, hidden, words[BEST : BEST + rows])

    def chain(self, token: int, caches: CacheSet, count: int) -> Iterator[int]:
        """Classic decode of `count` tokens after `token`, a step each time one is asked for.

        As recordings, the next step is launched before the host has looked at the token of this one. Caches hold the
        rows of what was taken, never of what ran ahead.
        """
        room = self._recorded(1, True, caches)
        if room is not None:
            yield from self._ahead(token, caches, room, count)
            return
        for _ in range(count):
            token = self.step([token], caches, "classic").argmax[0]
            yield token

    def _ahead(self, token: int, caches: CacheSet, room: Room, count: int) -> Iterator[int]:
        choice, slot, running, max_keys = self._choice(1, True), 0, False, 0
        first = written = turn = 0  # no step that was launched writes at position `written` or later
        try:
            for left in reversed(range(count)):
                if running:
                    room.check_ahead(caches, first + 1, turn)
                first = caches.length
                with torch.inference_mode():
                    if not running:
                        max_keys = room.fit(caches, first + 1)
                        room.send([token], first)
                        turn, written = room.turn, first + 1
                        self._recording(room, choice, 1, max_keys, False)[0]()
                        room.fetch(slot)
                    running = left > 0 and first + 2 <= max_keys  # buffers grow only when nothing is on its way
                    if running:
                        written = first + 2
                        self._recording(room, choice, 1, max_keys, True)[0]()
                        room.fetch(1 - slot)
                    token = room.wait(slot)[BEST]
                caches.reserve(1)
                slot = 1 - slot
                yield token
        finally:
            for layer in caches.layers:
                layer.touched(written - layer.length)

    def _launch(
        self,
        choice: Choice,
        ids: Tensor,
        position: Tensor,
        rows: int,
        kv: Sequence[Tensor],
        tables: Tables,
        max_keys: int,
        apart: Callable[[int, Tensor], Tensor] | None = None,
    ) -> FusedOutput:
        ops = self.kernels.fused
        assert ops is not None
        return fused_step(ops, self._fused, choice, ids, position, rows, kv, tables, max_keys, apart)

    @torch.inference_mode()
    def unpadded_step(self, token: int, caches: CacheSet) -> int:
        """A classic step with 1-row shapes, for timing only; its bytes may differ from `step`'s.

        With fused ops it is the classic step itself: their tiles have 8 slots in hardware, so nothing is padded.
        """
        if self._fusable(1, True):
            return self.step([token], caches, "classic").argmax[0]
        choice = {kind: self.policy.attention(1, kind, True) for kind in self._tables}
        run = Run(
            kernels=self.kernels,
            rows=1,
            linear=self.kernels.linear_any,
            geglu=lambda bits: self.policy.geglu(1, bits, True),
            rope="row",
            tables={kind: table.rows(caches.length, 1) for kind, table in self._tables.items()},
            attend=lambda layer, q, k, v: attend_step(
                self.kernels, choice[self._shapes[layer].kind], caches[layer], q, k, v, 1
            ),
        )
        h = self._layers_over(run, self.embed(torch.tensor([token], device=self.device)))
        hidden = self.kernels.rmsnorm(h, self._norm, self.config.rms_norm_eps)
        return self.kernels.argmax(self._capped(self.kernels.linear_any(hidden, self._head)))[0]

    def shared_kv(self, caches: CacheSet) -> SharedKV | LentKV:
        """What the drafter reads: committed rows only, at most a window of the sliding layer's."""
        layers = self.config.last_layer("sliding"), self.config.last_layer("full")
        if caches.room is not None:
            return LentKV(caches, *layers)
        sliding, full = (caches[layer].committed() for layer in layers)
        return SharedKV((sliding[0], sliding[1]), (full[0], full[1]), caches.length)

    def _layers_over(self, run: Run, h: Tensor) -> Tensor:
        for index, (shape, weights) in enumerate(zip(self._shapes, self._layers, strict=True)):
            h = run_layer(run, index, shape, weights, self.config.rms_norm_eps, h)
        return h

    def _linear(self, rows: int) -> Callable[[Tensor, Linear], Tensor]:
        """The product for a step of so many rows, as dispatch says."""
        op = self.kernels.linear_rows if self.policy.linear(rows) == "per_row" else self.kernels.linear
        return lambda x, w: op(x, w, rows)

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.final_logit_softcapping
        return logits if cap is None else self.kernels.softcap(logits, cap)
