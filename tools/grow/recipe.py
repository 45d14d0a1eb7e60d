"""What every tensor of a grown pair is made of: nano's codes at other places, noise, or a vector.

Recipes hold no large tensors, and are made one at a time. With d nano's width, D the grown one and c copies of the
stream, a norm's weight is nano's times sqrt(c d / D), which undoes what zero padding does to the mean square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.config import LayerShape, TextConfig
from engine.quantize import GROUP_SIZE
from tools.grow.codes import Codes
from tools.grow.geometry import Side
from tools.grow.maps import head_groups, head_map, head_rows, layer_map, stretch
from tools.grow.source import Source

POST_NORM = 2.0**-12
"""Post-norm weight of a random layer: what it adds is lost beside the stream (about 0.7), its rounding is not."""


@dataclass(frozen=True)
class Placement:
    """Codes, and the rows and groups of 64 columns where they go."""

    codes: Codes
    rows: Tensor
    groups: Tensor


@dataclass(frozen=True)
class Matrix:
    """Nano's codes in a matrix of zeros; `repeat` stacks the matrix so many times."""

    placements: tuple[Placement, ...]
    repeat: int = 1


@dataclass(frozen=True)
class Noise:
    """A full random matrix."""


@dataclass(frozen=True)
class Vector:
    """Values [n] at index [n], `fill` elsewhere."""

    values: Tensor
    index: Tensor
    fill: float = 0.0


Recipe = Matrix | Noise | Vector
Make = Callable[[], Recipe]


@dataclass(frozen=True)
class Stream:
    """How a nano hidden vector lies in a grown one: `copies` times from the start, zeros behind."""

    nano: int
    grown: int
    copies: int = 1

    @property
    def norm_factor(self) -> float:
        """What a norm's weight is multiplied by."""
        return math.sqrt(self.copies * self.nano / self.grown)

    def rows(self, copies: int | None = None) -> Tensor:
        """Place of each element, copy after copy."""
        return torch.arange(self.nano * (self.copies if copies is None else copies))

    def groups(self, copy: int = 0) -> Tensor:
        """Groups of 64 columns of one copy."""
        return torch.arange(self.nano // GROUP_SIZE) + copy * (self.nano // GROUP_SIZE)


@dataclass(frozen=True)
class Plan:
    """Recipes of one side of the pair."""

    source: Source
    nano: TextConfig
    grown: TextConfig
    side: Side
    embedding_factor: float

    @cached_property
    def split(self) -> bool:
        """Nano's 8-bit MLP in 4 bits: high and low nibbles side by side, over two copies of the input."""
        if self.side.mlp_bits is None:
            return False
        return self.side.mlp_bits < self.source.codes("layers.0.mlp.gate_proj").bits

    @property
    def stream(self) -> Stream:
        """The residual stream."""
        return Stream(self.nano.hidden_size, self.grown.hidden_size, 2 if self.split else 1)

    def layers(self, values: bool) -> Iterator[tuple[str, Make]]:
        """(name, recipe) of every tensor of every layer; a drafter's have no K and V."""
        period = self.nano.layer_types.index("full_attention") + 1
        sources = layer_map(self.nano.num_hidden_layers, self.grown.num_hidden_layers, period)
        for index, shape in enumerate(self.grown.layers):
            names = _layer_names(shape, values)
            for name in names:
                if index in sources:
                    yield f"layers.{index}.{name}", _bind(self._kept, sources[index], name)
                else:
                    yield f"layers.{index}.{name}", _bind(self._random, index, name)

    def table(self, factor: float = 1.0) -> Matrix:
        """The embedding table: row i is nano's row i mod its vocabulary; equal logits go to the lowest id."""
        codes = self.source.codes("embed_tokens").scaled(factor)
        rows = torch.arange(codes.rows)
        copies = tuple(Placement(codes, rows, self.stream.groups(copy)) for copy in range(self.stream.copies))
        return Matrix(copies, self.grown.vocab_size // codes.rows)

    def norm(self, name: str, factor: float = 1.0, copies: int | None = None) -> Vector:
        """A norm over the stream; `copies` fewer than the stream's drops the others."""
        weight = self.source.vector(name) * (self.stream.norm_factor * factor)
        rows = self.stream.rows(copies)
        return Vector(weight.repeat(len(rows) // len(weight)), rows)

    def _random(self, layer: int, name: str) -> Recipe:
        none = torch.zeros(0)
        if "post_" in name:
            return Vector(none, none.long(), POST_NORM)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return Vector(none, none.long(), self.grown.layers[layer].head_dim ** -0.25)
        return Vector(none, none.long(), 1.0) if name.endswith(("norm.weight", "layer_scalar")) else Noise()

    def _kept(self, layer: int, name: str) -> Recipe:
        full_name, module = f"layers.{layer}.{name}", f"layers.{layer}.{name.removesuffix('.weight')}"
        shape = self.nano.layers[layer]
        if name == "layer_scalar":
            return Vector(self.source.vector(full_name), torch.arange(1))
        if name.startswith("mlp."):
            return self._mlp(module)
        if name.endswith("layernorm.weight"):
            return self.norm(full_name)
        return self._attention(full_name, module, shape, self.grown.layer_shape(shape.kind))

    def _attention(self, full_name: str, module: str, nano: LayerShape, grown: LayerShape) -> Recipe:
        """Projections and head norms. V keeps its order where it has a matrix of its own, so that groups coincide."""
        factor, heads = stretch(nano, grown), head_map(nano, grown)
        values = factor if nano.k_eq_v else 1
        if module.endswith("_norm"):
            index = torch.arange(nano.head_dim) * factor
            return Vector(self.source.vector(full_name) * math.sqrt(nano.head_dim / grown.head_dim), index)
        codes = self.source.codes(module)
        if module.endswith("o_proj"):
            wide = codes.spread(values) if values > 1 else codes
            groups = head_groups(heads, wide.groups // nano.num_heads, grown.head_dim)
            copies = range(self.stream.copies)
            rows = torch.arange(self.stream.nano)
            return Matrix(tuple(Placement(wide, rows + copy * self.stream.nano, groups) for copy in copies))
        own = heads if module.endswith("q_proj") else list(range(nano.num_kv_heads))
        step = values if module.endswith("v_proj") else factor
        rows = head_rows(own, nano.head_dim, grown.head_dim, step)
        return Matrix((Placement(codes, rows, self.stream.groups()),))

    def _mlp(self, module: str) -> Matrix:
        codes = self.source.codes(module)
        inner = self.nano.intermediate_size
        incoming = Stream(inner, self.grown.intermediate_size) if module.endswith("down_proj") else self.stream
        parts = codes.split() if self.split else (codes,)
        rows = torch.arange(codes.rows)
        return Matrix(
            tuple(
                Placement(part, rows + copy * codes.rows, incoming.groups(place))
                for copy in range(len(parts))
                for place, part in enumerate(parts)
            )
        )


def target_recipes(plan: Plan) -> Iterator[tuple[str, Make]]:
    """(name, recipe) of every tensor of the target."""
    yield "embed_tokens.weight", lambda: plan.table(plan.embedding_factor)
    yield from plan.layers(values=True)
    yield "norm.weight", lambda: plan.norm("norm.weight", 1 / plan.embedding_factor, copies=1)


def drafter_recipes(plan: Plan, backbone: Stream) -> Iterator[tuple[str, Make]]:
    """(name, recipe) of every tensor of the drafter; `backbone` is the target's stream.

    The target's scaled embedding comes in as nano's, its hidden vector divided by the embedding factor.
    """
    yield "pre_projection.weight", lambda: _pre_projection(plan, backbone)
    yield "embed_tokens.weight", plan.table
    yield from plan.layers(values=False)
    yield "norm.weight", lambda: plan.norm("norm.weight")
    yield "post_projection.weight", lambda: _post_projection(plan, backbone)


def _pre_projection(plan: Plan, backbone: Stream) -> Matrix:
    codes, rows = plan.source.codes("pre_projection"), plan.stream.rows()
    half = codes.groups // 2
    embedded, hidden = codes.columns(0, half), codes.columns(half, 2 * half).scaled(plan.embedding_factor)
    groups = backbone.groups()
    behind = backbone.grown // GROUP_SIZE
    return Matrix((Placement(embedded, rows, groups), Placement(hidden, rows, groups + behind)))


def _post_projection(plan: Plan, backbone: Stream) -> Matrix:
    codes = plan.source.codes("post_projection").scaled(1 / plan.embedding_factor)
    return Matrix((Placement(codes, backbone.rows(copies=1), plan.stream.groups()),))


def _layer_names(shape: LayerShape, values: bool) -> list[str]:
    keys = ["k_proj", "k_norm"] + ([] if shape.k_eq_v else ["v_proj"]) if values else []
    names = [f"self_attn.{part}.weight" for part in ("q_proj", *keys, "o_proj", "q_norm")]
    names += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    return [*names, *(f"{norm}_layernorm.weight" for norm in norms), "layer_scalar"]


def _bind(make: Callable[[int, str], Recipe], layer: int, name: str) -> Make:
    return lambda: make(layer, name)
