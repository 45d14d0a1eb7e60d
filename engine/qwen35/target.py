"""The Qwen 3.5 text target: prefill, one step of 1 to 8 rows, and the hidden states that a drafter taps.

A step computes 8 rows whatever it was asked for, so classic decode and verify run the same shapes; the dispatch
policy says which form each op takes. The recurrence of the linear layers goes row by row in both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import attend_prefill, attend_step
from engine.capture import FINAL_KIND, Capture
from engine.checkpoint import Checkpoint
from engine.config import Kind, RopeParameters
from engine.dispatch import DispatchPolicy
from engine.errors import EngineError
from engine.layers import RopeTable, padded_ids
from engine.protocols import StepMode
from engine.qwen35.cache import DraftContext, Qwen35Caches, new_caches
from engine.qwen35.config import Qwen35Config
from engine.qwen35.layers import DeltaForm, Run, run_layer
from engine.qwen35.weights import FullWeights, LayerWeights, WeightReader, layout_of, target_layer, target_tensors
from engine.target import StepOutput
from kernels import MAX_ROWS, Kernels, Linear, kernels_for
from kernels.delta import DeltaOps

DISPATCHED_AS: Kind = "sliding"
"""The dispatch policy's word for attention at head_dim 256, which is what this family's full layers have."""


@dataclass(frozen=True)
class TappedContext:
    """What the drafter reads: its own context of this sequence, and the number of committed rows."""

    context: DraftContext
    length: int


class Qwen35Target:
    """A loaded target. Weights are shared between copies that differ in policy or kernels."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Qwen35Config,
        policy: DispatchPolicy,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        kernels: Kernels | None = None,
    ) -> None:
        layout = layout_of(checkpoint, config)
        checkpoint.verify(target_tensors(config, layout), role="target")
        self.config, self.policy, self.device, self.dtype = config, policy, device, dtype
        self.kernels = kernels or kernels_for(policy.backend)
        self.delta = DeltaOps()
        self.tapped: tuple[int, ...] = ()
        reader = WeightReader(checkpoint, self.kernels, dtype, device, layout)
        self._layers: list[LayerWeights] = [
            target_layer(reader, config, index) for index in range(config.num_hidden_layers)
        ]
        table = checkpoint.weight("embed_tokens", dtype, device)
        self._head = self.kernels.prepare(table)
        self._embedding = self.kernels.table(table, self._head)
        self._embed_scale = torch.ones((), dtype=dtype, device=device)
        self._norm = reader.norm("norm")
        self._table = RopeTable(RopeParameters(config.rope_theta), config.rotary_dim, device)

    def with_policy(self, policy: DispatchPolicy) -> Qwen35Target:
        """The same weights under another policy."""
        if policy.backend != self.policy.backend:
            raise EngineError(f"target: loaded for backend {self.policy.backend}, load it again for {policy.backend}")
        other = copy.copy(self)
        other.policy = policy
        return other

    def with_kernels(self, kernels: Kernels, delta: DeltaOps | None = None) -> Qwen35Target:
        """The same weights computed by other bundles of the same backend."""
        other = copy.copy(self)
        other.kernels, other.delta = kernels, delta or self.delta
        return other

    def linear_weights(self) -> Iterator[tuple[str, Linear]]:
        """Every matrix of the verify path, by name."""
        for index, layer in enumerate(self._layers):
            if isinstance(layer, FullWeights):
                yield f"layer {index} q_proj+k_proj+v_proj", layer.qkv
                yield f"layer {index} o_proj", layer.o
            else:
                yield f"layer {index} in_proj_qkv+z+b+a", layer.in_proj
                yield f"layer {index} out_proj", layer.out
            yield f"layer {index} gate_proj+up_proj", layer.mlp.gate_up
            yield f"layer {index} down_proj", layer.mlp.down
        yield "LM head", self._head

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices as their products read them."""
        return sum(w.nbytes for _, w in self.linear_weights())

    @property
    def rope_table(self) -> RopeTable:
        """cos and sin of the full layers' turned elements."""
        return self._table

    def new_caches(self) -> Qwen35Caches:
        """Empty caches."""
        return new_caches(self.config, self.dtype, self.device)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [n, H] of ids [n]; this family does not scale them."""
        return self.kernels.embed(self._embedding, ids, self._embed_scale)

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], caches: Qwen35Caches, capture: Capture | None = None) -> Tensor:
        """Append one range of a prompt; the last row's hidden state [H] after the final norm."""
        n = len(tokens)
        if n == 0:
            raise EngineError("prefill: no tokens; a range of a prompt has at least one")
        run = Run(
            kernels=self.kernels,
            delta=self.delta,
            rows=n,
            linear=self.kernels.linear_any,
            rope="row",
            table=self._table.rows(caches.length, n),
            attend=lambda layer, q, k, v: attend_prefill(caches.kv(layer), q, k, v),
            states=caches.state,
            form="prefill",
            capture=capture,
        )
        h = self._layers_over(run, self.embed(torch.tensor(list(tokens), device=self.device)), caches, tap=True)
        return self.kernels.rmsnorm(h[-1:], self._norm, self.config.rms_norm_eps)[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [r, V] of up to 8 final-normed rows [r, H]."""
        rows = hidden.shape[0]
        padded = hidden.new_zeros(MAX_ROWS, hidden.shape[1])
        padded[:rows] = hidden
        return self._linear(rows)(padded, self._head)[:rows]

    @torch.inference_mode()
    def step(
        self, tokens: Sequence[int], caches: Qwen35Caches, mode: StepMode, capture: Capture | None = None
    ) -> StepOutput:
        """Append 1 to 8 rows. `classic` takes one row and decode's kernels whatever the stage."""
        rows, decode = len(tokens), mode == "classic"
        if not 1 <= rows <= (1 if decode else MAX_ROWS):
            raise EngineError(f"step: {rows} rows in mode {mode}; classic takes 1, verify 1 to {MAX_ROWS}")
        policy = self.policy
        choice = policy.attention(rows, DISPATCHED_AS, decode)
        run = Run(
            kernels=self.kernels,
            delta=self.delta,
            rows=rows,
            linear=self._linear(rows),
            rope=policy.rope(rows, decode),
            table=self._table.rows(caches.length, MAX_ROWS),
            attend=lambda layer, q, k, v: attend_step(self.kernels, choice, caches.kv(layer), q, k, v, rows),
            states=caches.state,
            form=delta_form(policy, rows, decode),
            capture=capture,
        )
        h = self._layers_over(run, self.embed(padded_ids(list(tokens), self.device)), caches, tap=not decode)
        hidden = self.kernels.rmsnorm(h, self._norm, self.config.rms_norm_eps)
        logits = run.linear(hidden, self._head)[:rows]
        run.note(len(self._layers), FINAL_KIND, "final norm", hidden)
        run.note(len(self._layers), FINAL_KIND, "LM head", logits)
        return StepOutput(logits, hidden[:rows], self.kernels.argmax(logits))

    @torch.inference_mode()
    def unpadded_step(self, token: int, caches: Qwen35Caches) -> int:
        """A classic step with 1-row shapes, for timing only; its bytes may differ from `step`'s."""
        choice = self.policy.attention(1, DISPATCHED_AS, True)
        run = Run(
            kernels=self.kernels,
            delta=self.delta,
            rows=1,
            linear=self.kernels.linear_any,
            rope="row",
            table=self._table.rows(caches.length, 1),
            attend=lambda layer, q, k, v: attend_step(self.kernels, choice, caches.kv(layer), q, k, v, 1),
            states=caches.state,
            form="rows",
        )
        h = self._layers_over(run, self.embed(torch.tensor([token], device=self.device)), caches, tap=False)
        hidden = self.kernels.rmsnorm(h, self._norm, self.config.rms_norm_eps)
        return self.kernels.argmax(self.kernels.linear_any(hidden, self._head))[0]

    def shared_kv(self, caches: Qwen35Caches) -> TappedContext:
        """What the drafter reads: hidden states of the tapped layers that it has not seen, and its K/V of the others.

        Call it after the rollback; the drafter adds to the context.
        """
        return TappedContext(caches.context, caches.length)

    def _layers_over(self, run: Run, h: Tensor, caches: Qwen35Caches, tap: bool) -> Tensor:
        """All layers over h [n, H]; with `tap`, the drafter's layers are kept for it."""
        position, taps = caches.length, []
        for index, weights in enumerate(self._layers):
            h = run_layer(run, index, self.config, weights, h)
            if tap and index in self.tapped:
                taps.append(h[: run.rows])
        if taps:
            caches.context.add(position, torch.cat(taps, -1))
        return h

    def _linear(self, rows: int) -> Callable[[Tensor, Linear], Tensor]:
        """The product for a step of so many rows, as dispatch says."""
        op = self.kernels.linear_rows if self.policy.linear(rows) == "per_row" else self.kernels.linear
        return lambda x, w: op(x, w, rows)


def delta_form(policy: DispatchPolicy, rows: int, decode: bool) -> DeltaForm:
    """How a step computes the recurrence: stage `base` takes a block by matrix products, as prefill does."""
    return "chunk" if policy.stage == "base" and rows > 1 and not decode else "rows"
