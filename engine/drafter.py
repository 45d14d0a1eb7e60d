"""The MTP drafter: four query-only layers over the target's last sliding and last full K/V.

It has no cache. Each step takes the target's scaled embedding of the newest token and a hidden vector of
the target's width, and gives logits over its own tied table and the vector for the next step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from engine.checkpoint import Checkpoint
from engine.config import DrafterConfig, Kind, LayerShape
from engine.dispatch import DispatchPolicy
from engine.drafts import Drafts
from engine.errors import EngineError, refuse_other_target
from engine.fused import tables_upto
from engine.fused_draft import DraftWeights, fused_draft
from engine.kv import LentKV, SharedKV
from engine.layers import LayerWeights, Run, rope_tables, run_layer
from engine.room import IDS, Room
from engine.target import Target
from engine.weights import drafter_tensors, layer_weights
from kernels import Kernels, Linear, kernels_for

SharedPairs = dict[Kind, tuple[Tensor, Tensor, int]]


class Drafter:
    """A loaded drafter; `bind` ties it to the target whose embeddings and K/V it reads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DrafterConfig,
        policy: DispatchPolicy,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        kernels: Kernels | None = None,
    ) -> None:
        checkpoint.verify(drafter_tensors(config), role="drafter")
        self.config, self.policy, self.device, self.dtype = config, policy, device, dtype
        self.kernels = kernels or kernels_for(policy.backend)
        self._shapes = tuple(_query_only(shape) for shape in config.layers)
        self._layers: list[LayerWeights] = [
            layer_weights(checkpoint, self.kernels, f"layers.{index}", shape, dtype, device, values=False)
            for index, shape in enumerate(self._shapes)
        ]
        self._head = self.kernels.prepare(checkpoint.weight("embed_tokens", dtype, device))
        self._pre = self.kernels.prepare(checkpoint.weight("pre_projection", dtype, device))
        self._post = self.kernels.prepare(checkpoint.weight("post_projection", dtype, device))
        self._screen = self.kernels.screen(self._head) if self.kernels.screen is not None else None
        self._norm = checkpoint.tensor("norm.weight").float().to(device)
        self._tables = rope_tables(config, device)
        self._target: Target | None = None

    def bind(self, target: Target) -> None:
        """Check that the target fits, and keep it for its embeddings; PairError names both sizes and their keys."""
        mine, its = self.config, target.config
        statements = (
            ("drafter backbone_hidden_size {}, target hidden_size {}", mine.backbone_hidden_size, its.hidden_size),
            ("drafter vocab_size {}, target vocab_size {}", mine.vocab_size, its.vocab_size),
            ("drafter sliding_window {}, target sliding_window {}", mine.sliding_window, its.sliding_window),
            ("drafter head_dim {}, target head_dim {}", mine.head_dim, its.head_dim),
            ("drafter global_head_dim {}, target global_head_dim {}", mine.global_head_dim, its.global_head_dim),
            (
                "drafter num_key_value_heads {}, target num_key_value_heads {}",
                mine.num_key_value_heads,
                its.num_key_value_heads,
            ),
            (
                "drafter num_global_key_value_heads {}, target num_global_key_value_heads {}",
                mine.num_global_key_value_heads,
                its.num_global_key_value_heads,
            ),
            ("drafter rope_parameters {}, target rope_parameters {}", mine.rope_sliding, its.rope_sliding),
            ("drafter rope_parameters {}, target rope_parameters {}", mine.rope_full, its.rope_full),
        )
        refuse_other_target(statements)
        self._target = target

    def with_policy(self, policy: DispatchPolicy) -> Drafter:
        """The same weights under another policy; bind it again."""
        other = copy.copy(self)
        other.policy, other._target = policy, None
        return other

    def linear_weights(self) -> Iterator[tuple[str, Linear]]:
        """Every matrix, by name."""
        yield "drafter pre_projection", self._pre
        for index, layer in enumerate(self._layers):
            yield f"drafter layer {index} q_proj", layer.qkv
            yield f"drafter layer {index} o_proj", layer.o
            yield f"drafter layer {index} gate_proj+up_proj", layer.gate_up
            yield f"drafter layer {index} down_proj", layer.down
        yield "drafter post_projection", self._post
        yield "drafter LM head", self._head

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices as their products read them."""
        return sum(w.nbytes for _, w in self.linear_weights())

    @torch.inference_mode()
    def draft(
        self, token: int, hidden: Tensor, shared: SharedKV | LentKV, count: int, position_offset: int = -1
    ) -> Sequence[int]:
        """`count` greedy proposals after `token`; hidden [B] is the target's, final norm applied.

        The rotary position is `shared.length + position_offset` in every step of the round: -1 is the last
        committed position, 0 the token's own. Over caches with a room the proposals stay on the device until they are
        looked at.
        """
        fused = self.kernels.fused is not None and self.policy.flags.use_cuda_graphs
        if isinstance(shared, LentKV) and fused and position_offset == -1 and count:
            return self._recorded_chain(token, hidden, shared, count)
        pairs = _pairs(shared, self.kernels.backend)
        vector, proposals = hidden.view(1, -1), []
        for step in range(count):
            y = self._forward(token, vector, pairs, shared.length + position_offset)
            token = self.kernels.argmax(self.kernels.linear_any(y, self._head))[0]
            proposals.append(token)
            if step + 1 < count:
                vector = self.kernels.linear_any(y, self._post)
        return proposals

    @torch.inference_mode()
    def draft_step(self, token: int, vector: Tensor, shared: SharedKV | LentKV, position: int) -> tuple[Tensor, Tensor]:
        """One step at a rotary position: (logits [V], vector [B] for the next step)."""
        y = self._forward(token, vector.view(1, -1), _pairs(shared, self.kernels.backend), position)
        return self.kernels.linear_any(y, self._head)[0], self.kernels.linear_any(y, self._post)[0]

    def _recorded_chain(self, token: int, hidden: Tensor, shared: LentKV, count: int) -> Drafts:
        """Run the recording of a chain of so many steps over the room of the target's caches."""
        room = shared.caches.room
        assert isinstance(room, Room)
        max_keys = room.fit(shared.caches, shared.length + 1 + count)
        room.send([token], shared.length)
        room.vector[0].copy_(hidden)
        replay = self.recording(shared, count, max_keys)
        room.mark(0)
        replay()
        room.mark(1)

        def read() -> list[int]:
            room.fetch()
            return room.wait()[IDS + 1 : IDS + 1 + count]

        drafts = Drafts(token, shared.length, count, read, room.span)
        room.drafted = drafts
        return drafts

    def recording(
        self, shared: LentKV, count: int, max_keys: int, verified: Tensor | None = None
    ) -> Callable[[], None]:
        """What drafts `count` tokens over the room of the target's caches, as its words say.

        With `verified`, the states [8, H] that a verify step of count + 1 rows leaves, it carries on behind what that
        step accepts.
        """
        room, target = shared.caches.room, self._target
        if target is None:
            raise EngineError("drafter: not bound to a target; call bind(target) first")
        assert isinstance(room, Room)
        ops = self.kernels.fused_draft or self.kernels.fused
        layers = shared.layers  # a recording outlives the caches: holding them would keep their room from the next ones

        def run() -> object:
            assert ops is not None
            weights = self._fused(target)
            table, scale, pre = weights.embedding, weights.embed_scale, weights.pre
            if verified is None:
                joined = ops.join(table, room.ids, 0, None, scale, room.vector, pre)
            else:
                places = room.position, room.draft_position
                joined = ops.join_accepted(table, room.ids, room.best, verified, *places, count + 1, scale, pre)
            kv = {kind: room.kv[layer] for kind, layer in layers.items()}
            tables = tables_upto(self._tables, max_keys)
            fused_draft(ops, weights, joined, room.ids, room.draft_position, kv, tables, max_keys, count)
            return tables, weights, verified  # the recording reads them, so it keeps them

        key = ("draft", count, None if verified is None else verified.data_ptr(), self, ops)
        return room.recorded(key, run)[0]

    def _fused(self, target: Target) -> DraftWeights:
        """The chain's weights, the target's table among them."""
        bits = {layer.gate_up.bits for layer in self._layers}
        return DraftWeights(
            shapes=self._shapes,
            layers=tuple(self._layers),
            embedding=target.head,
            embed_scale=target.embed_scale,
            pre=self._pre,
            post=self._post,
            head=self._head,
            final_norm=self._norm,
            window=target.config.sliding_window,
            eps=self.config.rms_norm_eps,
            fused_geglu={width: self.policy.geglu(1, width, True) == "fused" for width in bits},
            screen=self._screen,
        )

    def _forward(self, token: int, vector: Tensor, pairs: SharedPairs, position: int) -> Tensor:
        """Final-normed state [1, h]."""
        target = self._target
        if target is None:
            raise EngineError("drafter: not bound to a target; call bind(target) first")
        embedded = target.embed(torch.tensor([token], device=self.device))
        kernels = self.kernels

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values, first = pairs[self._shapes[layer].kind]
            return kernels.sdpa_rows(q, keys, values, [(0, keys.shape[1])], first)

        run = Run(
            kernels=kernels,
            rows=1,
            linear=kernels.linear_any,
            geglu=lambda bits: self.policy.geglu(1, bits, True),
            rope="row",
            tables={kind: table.rows(max(position, 0), 1) for kind, table in self._tables.items()},
            attend=attend,
        )
        h = kernels.linear_any(torch.cat((embedded, vector), -1), self._pre)
        for index, (shape, weights) in enumerate(zip(self._shapes, self._layers, strict=True)):
            h = run_layer(run, index, shape, weights, self.config.rms_norm_eps, h)
        return kernels.rmsnorm(h, self._norm, self.config.rms_norm_eps)


def _pairs(shared: SharedKV | LentKV, backend: str) -> SharedPairs:
    """The shared K and V with the position of their first key.

    The reference backend computes in fp32: widening is exact, and cheaper once per round than in every layer.
    """
    found: SharedPairs = {}
    kinds: tuple[tuple[Kind, tuple[Tensor, Tensor]], ...] = (("sliding", shared.sliding), ("full", shared.full))
    for kind, (k, v) in kinds:
        first = shared.length - k.shape[1]
        found[kind] = (k.float(), v.float(), first) if backend == "reference" else (k, v, first)
    return found


def _query_only(shape: LayerShape) -> LayerShape:
    """The layer's own matrices: queries, and no K or V, so none to share either."""
    return LayerShape(shape.kind, shape.num_heads, 0, shape.head_dim, False)
