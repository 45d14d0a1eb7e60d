"""The DFlash drafter: one pass over [carried token, mask, mask, ...] proposes a token for every mask.

Its context is the target's hidden states after a few tapped layers, joined and projected once per committed row;
their K/V are cached. K/V of the block are made anew each round and dropped. (DFlash: arXiv 2602.06036.)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cache import LinearCache
from engine.checkpoint import Checkpoint
from engine.config import RopeParameters
from engine.dispatch import DispatchPolicy
from engine.errors import EngineError, refuse_other_target
from engine.layers import RopeTable
from engine.qwen35.cache import DraftContext
from engine.qwen35.config import DFlashConfig
from engine.qwen35.layers import mlp, rotate
from engine.qwen35.target import Qwen35Target, TappedContext
from engine.qwen35.weights import DrafterLayer, WeightReader, drafter_layer, drafter_tensors
from kernels import Kernels, Linear, kernels_for
from kernels.delta import DeltaOps


class DFlashDrafter:
    """A loaded drafter; `bind` ties it to the target whose embeddings, head and hidden states it uses."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DFlashConfig,
        policy: DispatchPolicy,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        kernels: Kernels | None = None,
    ) -> None:
        checkpoint.verify(drafter_tensors(config), role="drafter")
        self.config, self.policy, self.device, self.dtype = config, policy, device, dtype
        self.kernels = kernels or kernels_for(policy.backend)
        self.delta = DeltaOps()
        reader = WeightReader(checkpoint, self.kernels, dtype, device)
        self._layers: list[DrafterLayer] = [
            drafter_layer(reader, config, index) for index in range(config.num_hidden_layers)
        ]
        self._fc = reader.matrix("fc")
        self._hidden_norm, self._norm = reader.vector("hidden_norm.weight"), reader.vector("norm.weight")
        self._table = RopeTable(RopeParameters(config.rope_theta), config.head_dim, device)
        self._target: Qwen35Target | None = None

    def bind(self, target: Qwen35Target) -> None:
        """Check that the target fits, and have it tap its layers; PairError names both sizes and their keys."""
        mine, its = self.config, target.config
        statements = (
            ("drafter hidden_size {}, target hidden_size {}", mine.hidden_size, its.hidden_size),
            ("drafter vocab_size {}, target vocab_size {}", mine.vocab_size, its.vocab_size),
            (
                "drafter num_target_layers {}, target num_hidden_layers {}",
                mine.num_target_layers,
                its.num_hidden_layers,
            ),
        )
        refuse_other_target(statements)
        target.tapped = mine.target_layer_ids
        self._target = target

    def with_policy(self, policy: DispatchPolicy) -> DFlashDrafter:
        """The same weights under another policy; bind it again."""
        other = copy.copy(self)
        other.policy, other._target = policy, None
        return other

    def linear_weights(self) -> Iterator[tuple[str, Linear]]:
        """Every matrix, by name."""
        yield "drafter fc", self._fc
        for index, layer in enumerate(self._layers):
            yield f"drafter layer {index} q_proj", layer.q
            yield f"drafter layer {index} k_proj+v_proj", layer.kv
            yield f"drafter layer {index} o_proj", layer.o
            yield f"drafter layer {index} gate_proj+up_proj", layer.mlp.gate_up
            yield f"drafter layer {index} down_proj", layer.mlp.down

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices as their products read them."""
        return sum(w.nbytes for _, w in self.linear_weights())

    @torch.inference_mode()
    def draft(self, token: int, hidden: Tensor, shared: TappedContext, count: int) -> list[int]:
        """`count` greedy proposals after `token`, all of one pass; `hidden` is not used: the taps hold more.

        Reads the taps that are waiting in the context, so call it once per round, after the rollback.
        """
        return self.kernels.argmax(self.draft_logits(token, shared, count))

    @torch.inference_mode()
    def draft_logits(self, token: int, shared: TappedContext, count: int) -> Tensor:
        """The target's head over the `count` masked rows [count, V]."""
        target = self._target
        if target is None:
            raise EngineError("drafter: not bound to a target; call bind(target) first")
        if not 1 <= count < self.config.block_size:
            raise EngineError(f"drafter: {count} drafts asked for, its block of {self.config.block_size} holds fewer")
        self._read(shared)
        ids = torch.tensor([token, *[self.config.mask_token_id] * count], device=self.device)
        h = target.embed(ids)
        table = self._table.rows(shared.length, count + 1)
        for weights, held in zip(self._layers, shared.context.kv, strict=True):
            h = self._layer(weights, held, table, h)
        return target.logits(self.kernels.rmsnorm(h, self._norm, self.config.rms_norm_eps)[1:])

    def _read(self, shared: TappedContext) -> None:
        """Turn waiting taps into K/V of every layer."""
        context: DraftContext = shared.context
        taps = context.take(shared.length)
        if taps is None:
            return
        config, position = self.config, context.read
        if not context.kv:
            context.kv = [
                LinearCache(config.num_key_value_heads, config.head_dim, self.dtype, self.device) for _ in self._layers
            ]
        features = self.kernels.rmsnorm(self.kernels.linear_any(taps, self._fc), self._hidden_norm, config.rms_norm_eps)
        table = self._table.rows(position, features.shape[0])
        for weights, held in zip(self._layers, context.kv, strict=True):
            k, v = self._keys_values(weights, table, features)
            held.write(k.transpose(0, 1), v.transpose(0, 1))

    def _keys_values(self, w: DrafterLayer, table: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """k after norm and RoPE, and v, of rows x [n, H], each [n, Hkv, D]."""
        config = self.config
        k, v = self.kernels.linear_any(x, w.kv).view(x.shape[0], 2, -1, config.head_dim).unbind(1)
        normed = self.kernels.rmsnorm(k.contiguous(), w.k_norm, config.rms_norm_eps)
        return rotate(self.kernels.rope_row, normed, table), v

    def _layer(self, w: DrafterLayer, held: LinearCache, table: tuple[Tensor, Tensor], h: Tensor) -> Tensor:
        """One layer over the block h [n, H]: every row sees the whole context and the whole block."""
        kernels, config, n = self.kernels, self.config, h.shape[0]
        x = kernels.rmsnorm(h, w.mlp.input_norm, config.rms_norm_eps)
        q = kernels.linear_any(x, w.q).view(n, -1, config.head_dim)
        q = rotate(kernels.rope_row, kernels.rmsnorm(q, w.q_norm, config.rms_norm_eps), table)
        k, v = self._keys_values(w, table, x)
        context = held.committed()
        keys = torch.cat((context[0], k.transpose(0, 1)), 1)
        values = torch.cat((context[1], v.transpose(0, 1)), 1)
        core = F.scaled_dot_product_attention(  # no row contract here: a draft only chooses what is tried
            q.transpose(0, 1)[None], keys[None], values[None], scale=1.0, enable_gqa=True
        )
        h = h + kernels.linear_any(core[0].transpose(0, 1).reshape(n, -1), w.o)
        return h + mlp(
            kernels,
            self.delta,
            kernels.linear_any,
            w.mlp,
            kernels.rmsnorm(h, w.mlp.post_attention_norm, config.rms_norm_eps),
        )
