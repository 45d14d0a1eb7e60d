"""Each op of the verify path on its own: M rows against one-row calls, on the pair's real weights and shapes.

What a row must not see is varied on purpose: how many rows run, which slot a row sits in, what the other rows hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention import attend_step
from engine.compare import differing_bytes
from engine.config import Kind, LayerShape
from engine.errors import EngineError
from engine.layers import TABLE_STEP, rope_tables
from engine.qwen35.target import Qwen35Target
from engine.target import Target
from harness.record.lines import CheckLine
from harness.worker.bench import DEFAULT_STAGE, Bench, Output
from kernels import MAX_ROWS, Linear

FULL_CONTEXT = 1020  # rows on both sides of an edge of blocks and chunks of keys
HEAD = "LM head"
WRAP = 60  # rows past the window: a sliding layer's ring has gone round, and rows cross an edge there too

Call = Callable[[Tensor, Sequence[int]], Tensor]
"""(x [8, ...], the logical row in each real slot) -> [8, ...]; what depends on a row's position follows the row."""


@dataclass(frozen=True)
class Subject:
    """One op on one shape; `shape` is a row's."""

    name: str
    shape: tuple[int, ...]
    block: Call
    single: Call


@dataclass(frozen=True)
class Difference:
    """The first row whose bytes differ."""

    rows: int
    row: int
    setting: str
    differing: int
    total: int

    def __str__(self) -> str:
        return f"M = {self.rows}, row {self.row}, {self.setting}: {self.differing} of {self.total} bytes differ"


def run(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Args: ops, rows, seed. Sends a statement per op and shape."""
    target = bench.at(DEFAULT_STAGE).target
    generator = torch.Generator().manual_seed(args["seed"])
    rows: list[int] = sorted(set(args["rows"]))
    known = subjects_of(target)
    for op in args["ops"]:
        if op not in known:
            raise EngineError(f"row_identity: op {op} is none of this pair's; its ops: {', '.join(known)}")
    found = [(op, item) for op in args["ops"] for item in known[op](target, generator)]
    for done, (op, subject) in enumerate(found):
        out.progress(done, len(found), f"{op}: {subject.name}")
        x = torch.randn(MAX_ROWS, *subject.shape, generator=generator).to(dtype=target.dtype, device=target.device)
        send_difference(out, f"{op}: {subject.name}", compare(subject, x, rows))
    return {}


def send_difference(out: Output, name: str, difference: Difference | None) -> None:
    """One op on one shape as a statement."""
    out.line(
        CheckLine(
            case=out.case,
            name=name,
            passed=difference is None,
            expected="equal bytes",
            found="equal bytes" if difference is None else str(difference),
            differing_bytes=difference.differing if difference is not None else 0,
        )
    )


def subjects_of(target: Any) -> dict[str, Callable[[Any, torch.Generator], Iterator[Subject]]]:
    """The ops of the target's family, by name."""
    if isinstance(target, Qwen35Target):
        from harness.worker import row_identity_qwen35

        return row_identity_qwen35.SUBJECTS
    return SUBJECTS


def differing_ops(target: Any, rows: int, seed: int = 0) -> list[str]:
    """Ops that break the row contract on their own at this many rows, under the target's stage and flags."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for op, subjects in subjects_of(target).items():
        for subject in subjects(target, generator):
            x = torch.randn(MAX_ROWS, *subject.shape, generator=generator).to(dtype=target.dtype, device=target.device)
            if compare(subject, x, [rows]) is not None:
                found.append(op)
                break
    return found


def compare(subject: Subject, x: Tensor, rows: Sequence[int]) -> Difference | None:
    """The first difference between blocks of `rows` rows of x [8, ...] and one-row calls, or None."""
    expected = []
    for row in range(MAX_ROWS):
        alone = torch.zeros_like(x)
        alone[0] = x[row]
        expected.append(subject.single(alone, (row,))[0].clone())
    for count in rows:
        for setting, values, order in _settings(x, count):
            result = subject.block(values, order)
            for slot, row in enumerate(order):
                if bool(torch.isnan(values[slot].float()).any()):
                    continue
                differing = differing_bytes(result[slot], expected[row])
                if differing:
                    total = expected[row].numel() * expected[row].element_size()
                    return Difference(count, row, setting, differing, total)
    return None


def _settings(x: Tensor, count: int) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Blocks of `count` rows of x: beside zeros, beside NaN padding, in other slots, and beside NaN rows."""
    order = tuple(range(count))
    block = torch.zeros_like(x)
    block[:count] = x[:count]
    yield "in order", block, order
    poisoned = block.clone()
    poisoned[count:] = float("nan")
    yield "NaN in the padding", poisoned, order
    swapped = block.clone()
    swapped[:count] = x[:count].flip(0)
    yield "in reverse slots", swapped, order[::-1]
    for row in {0, count // 2, count - 1}:
        lonely = torch.full_like(x, float("nan"))
        lonely[row] = x[row]
        yield "beside NaN rows", lonely, order


# ---- the ops --------------------------------------------------------------------------------------------------------


def linears(target: Target, generator: torch.Generator) -> Iterator[Subject]:
    """Every distinct matrix shape of the layers, by the launch that the flags choose for that many rows."""
    seen: set[tuple[int, int, int]] = set()
    for name, weight in target.linear_weights():
        key = (weight.out_features, weight.in_features, weight.bits)
        if key not in seen and name != HEAD:
            seen.add(key)
            yield _linear(
                target, f"{name.partition(' ')[2].partition(' ')[2]} {key[0]}x{key[1]}, {key[2]} bits", weight
            )


def _linear(target: Target, name: str, weight: Linear) -> Subject:
    kernels, policy = target.kernels, target.policy

    def block(x: Tensor, order: Sequence[int]) -> Tensor:
        launch = kernels.linear if policy.linear(len(order)) == "multirow" else kernels.linear_rows
        return launch(x, weight, len(order))

    return Subject(name, (weight.in_features,), block, block)


def _norms(target: Target, generator: torch.Generator) -> Iterator[Subject]:
    """The hidden width, and each layer kind's heads with a weight of their own each."""
    kernels, config = target.kernels, target.config

    def norm(name: str, shape: tuple[int, ...]) -> Subject:
        weight = torch.rand(shape, generator=generator).to(target.device) + 0.5

        def call(x: Tensor, order: Sequence[int]) -> Tensor:
            return kernels.rmsnorm(x, weight, config.rms_norm_eps)

        return Subject(name, shape, call, call)

    yield norm(f"hidden {config.hidden_size}", (config.hidden_size,))
    for kind, index in _kinds(target).items():
        shape = config.layers[index]
        heads = shape.num_heads + (1 if shape.k_eq_v else 2) * shape.num_kv_heads
        yield norm(f"{kind} {heads} heads x {shape.head_dim}", (heads, shape.head_dim))


def _ropes(target: Target, generator: torch.Generator) -> Iterator[Subject]:
    """Each layer kind's table at neighbouring positions around a chunk's end; a row keeps its position in any slot."""
    for kind, index in _kinds(target).items():
        yield _rope(target, kind, target.config.layers[index])


def _rope(target: Target, kind: Kind, shape: LayerShape) -> Subject:
    kernels, policy = target.kernels, target.policy
    cos, sin = rope_tables(target.config, str(target.device))[kind].rows(TABLE_STEP - MAX_ROWS // 2, MAX_ROWS)

    def call(x: Tensor, order: Sequence[int], decode: bool) -> Tensor:
        picked = [*order, *[0] * (MAX_ROWS - len(order))]
        rotate = kernels.rope_row if policy.rope(len(order), decode) == "row" else kernels.rope_general
        return rotate(x, cos[picked], sin[picked])

    heads = shape.num_heads + shape.num_kv_heads
    return subject_of(f"{kind} {heads} heads x {shape.head_dim}", (heads, shape.head_dim), call)


def _geglus(target: Target, generator: torch.Generator) -> Iterator[Subject]:
    """The MLP's width, at the bits that the checkpoint stores it in."""
    mlps = [weight for name, weight in target.linear_weights() if name.endswith("gate_proj+up_proj")]
    for width, bits in sorted({(weight.out_features // 2, weight.bits) for weight in mlps}):
        yield _geglu(target, width, bits)


def _geglu(target: Target, width: int, bits: int) -> Subject:
    kernels, policy = target.kernels, target.policy

    def call(x: Tensor, order: Sequence[int], decode: bool) -> Tensor:
        gate, up = x.chunk(2, -1)
        fused = policy.geglu(len(order), bits, decode) == "fused"
        return kernels.geglu_fused(gate, up) if fused else kernels.geglu_ops(gate, up)

    return subject_of(f"{width} wide, {bits} bits", (2 * width,), call)


def heads_of(target: Target, generator: torch.Generator) -> Iterator[Subject]:
    """The whole head, soft cap included."""

    def call(x: Tensor, order: Sequence[int], decode: bool) -> Tensor:
        return target.logits(x[: len(order)])

    config = target.config
    yield subject_of(f"{config.vocab_size}x{config.hidden_size}", (config.hidden_size,), call)


def _attentions(target: Target, generator: torch.Generator) -> Iterator[Subject]:
    """Each layer kind over a filled cache, the sliding ring wrapped; one row is a step of classic decode."""
    for kind, index in _kinds(target).items():
        yield _attention(target, kind, index, generator)


def _attention(target: Target, kind: Kind, index: int, generator: torch.Generator) -> Subject:
    """x holds queries; row r's key and value are fixed, and a one-row call writes those of the rows before it first.

    A row's slot is its position here, so a block in reverse slots is the same block again.
    """
    kernels, policy, config = target.kernels, target.policy, target.config
    shape = config.layers[index]
    groups, width = shape.num_kv_heads, shape.head_dim

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype=target.dtype, device=target.device)

    held = config.sliding_window + WRAP if kind == "sliding" else FULL_CONTEXT
    cache = target.new_caches()[index]
    cache.write(random(groups, held, width), random(groups, held, width))
    keys, values = random(MAX_ROWS, groups, width), random(MAX_ROWS, groups, width)

    def call(x: Tensor, order: Sequence[int], decode: bool) -> Tensor:
        count, first = len(order), min(order)
        queries = torch.full_like(x, float("nan"))
        queries[[row - first for row in order]] = x[:count]
        own = cache.clone()
        if first:
            own.write(keys[:first].transpose(0, 1), values[:first].transpose(0, 1))
        k, v = torch.full_like(keys, float("nan")), torch.full_like(values, float("nan"))
        k[:count], v[:count] = keys[first : first + count], values[first : first + count]
        out = attend_step(kernels, policy.attention(count, kind, decode), own, queries, k, v, count)
        return out[[row - first for row in order]]

    return subject_of(f"{kind} {shape.num_heads} heads x {width} over {held} keys", (shape.num_heads, width), call)


def subject_of(name: str, shape: tuple[int, ...], call: Callable[[Tensor, Sequence[int], bool], Tensor]) -> Subject:
    """A subject whose one-row calls are classic decode's and whose blocks are verify's."""
    return Subject(
        name,
        shape,
        lambda x, order: call(x, order, False),
        lambda x, order: call(x, order, True),
    )


def _kinds(target: Target) -> dict[Kind, int]:
    """Layer kind -> index of its first layer."""
    kinds: dict[Kind, int] = {}
    for index, shape in enumerate(target.config.layers):
        kinds.setdefault(shape.kind, index)
    return kinds


SUBJECTS: dict[str, Callable[[Any, torch.Generator], Iterator[Subject]]] = {
    "linear": linears,
    "rmsnorm": _norms,
    "rope": _ropes,
    "geglu": _geglus,
    "attention": _attentions,
    "lm_head": heads_of,
}
