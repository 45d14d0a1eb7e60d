"""Times a draft chain on a GPU at the shapes of Gemma 4's drafters, random weights: no pair is loaded.

    python -m tools.time_draft                                              # both models
    python -m tools.time_draft --model 12b --shape 8192x1024-4bit=64,1,4,2,16 --shape 4096x1024-4bit=64,1,4,2,16
    python -m tools.time_draft --forms                                      # and other forms of a step
    python -m tools.time_draft --early enter --early residual join          # early after one op; after two others
    python -m tools.time_draft --launches                                   # counts launches; needs no GPU

A chain is what a round replays: what the last verify step accepted, then so many steps, recorded as one graph.
`tools.tune_qmv` times products alone; what reads their partial sums costs time too, so launch shapes (tile, unroll,
stages, warps, split) are tried here inside the chain, in turns with those of the table. `--forms` times, also in turns,
other forms of a step: with no row-wise launch that lets the next one start right after its wait (late), with queries
or GeGLU in a launch of their own (apart), with `down` of a bf16 drafter taking another number of its matrix's rows a
program (gated), with a bf16 head read whole and not through a screen. Tokens must not change.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.config import LayerShape
from engine.fused_draft import DraftWeights, fused_draft
from kernels import FusedOps, Linear, Screen
from kernels.gate.cases import EPS, GEOMETRIES, MAX_KEYS, RING, VOCABULARY, WINDOW, Geometry
from kernels.gate.record import Variant, recorded_launches
from kernels.jit import GROUP, INTERPRETED, SLOTS
from kernels.launch import LaunchShape, launch_shape
from kernels.repack import PackedWeight
from kernels.triton_backend import EARLY_IN_DRAFTS, FUSED_DRAFT, LATE, draft_ops, gated, releasing, screen_of
from tools.tune_qmv import Matrix, matrix_of, stream_gb_per_s

Shapes = Mapping[Matrix, LaunchShape]
MODELS = {"12b": (GEOMETRIES[0], 4), "31b": (GEOMETRIES[1], 16)}
"""A target, and the bits of its drafter's matrices."""
DRAFTER = GEOMETRIES[2]
KINDS = ("sliding", "sliding", "sliding", "full")
CONTEXT = 512
PER_PROGRAM = (64, 256)
EARLY = f"time drafts that let the next launch start early behind these alone, of {', '.join(EARLY_IN_DRAFTS)}"
SCALE_AND_BIAS = (0xBCF0 << 16 | 0x3B80) - (1 << 32)
"""2^-8 and -7.5 times that, in bf16: 4-bit codes lie on either side of zero."""


class Chain:
    """A drafter of random weights over random caches, or of uninitialised ones where nothing is to run."""

    def __init__(self, target: Geometry, bits: int, device: str, shapes: Shapes, filled: bool = True) -> None:
        self.bits, self.device, self.shapes, self.filled = bits, torch.device(device), shapes, filled
        self.ops: FusedOps = FUSED_DRAFT
        self.nbytes = 0
        self.used: set[tuple[int, int, int]] = set()
        sliding, full = target.layers
        layers = [self._layer(kind, sliding.heads) for kind in KINDS]
        self.weights = DraftWeights(
            shapes=tuple(shape for shape, _ in layers),
            layers=tuple(weights for _, weights in layers),
            embedding=self._linear(target.hidden, VOCABULARY, 4),
            embed_scale=self._halves(1),
            pre=self._linear(2 * target.hidden, DRAFTER.hidden, bits),
            post=self._linear(DRAFTER.hidden, target.hidden, bits),
            head=self._linear(DRAFTER.hidden, VOCABULARY, bits),
            final_norm=self._floats(DRAFTER.hidden),
            window=WINDOW,
            eps=EPS,
            fused_geglu={bits: True},
        )
        self.nbytes -= self.weights.embedding.nbytes  # of which a step reads one row
        if bits == 16:
            self.weights = replace(self.weights, screen=self._screen())
            self.nbytes -= self.weights.head.nbytes  # of which it reads a few rows
        self.kv: dict[Any, Tensor] = {
            "sliding": self._halves(2, sliding.kv_heads, RING, sliding.width),
            "full": self._halves(2, full.kv_heads, MAX_KEYS, full.width),
        }
        self.tables: dict[Any, tuple[Tensor, Tensor]] = {
            layer.name: (self._floats(MAX_KEYS, 1, layer.width), self._floats(MAX_KEYS, 1, layer.width))
            for layer in (sliding, full)
        }
        self.hidden = self._halves(SLOTS, target.hidden)
        self.ids, self.best, self.position, self.draft_position = (
            torch.full((count,), value, dtype=torch.int32, device=self.device)
            for count, value in ((SLOTS, 3), (SLOTS, 5), (1, CONTEXT), (1, CONTEXT))
        )

    def with_ops(self, ops: FusedOps) -> Chain:
        """The same chain over the same memory, with other ops."""
        other = copy.copy(self)
        other.ops = ops
        return other

    def with_whole_head(self) -> Chain:
        """The same chain whose head is read as it is."""
        assert self.weights.screen is not None
        other = copy.copy(self)
        other.weights = replace(self.weights, screen=None)
        other.nbytes += self.weights.head.nbytes - self.weights.screen.weight.nbytes
        return other

    def run(self, steps: int) -> None:
        """Behind a verify step that accepts none of its drafts, `steps` tokens into the ids."""
        w = self.weights
        joined = self.ops.join_accepted(
            w.embedding,
            self.ids,
            self.best,
            self.hidden,
            self.position,
            self.draft_position,
            steps + 1,
            w.embed_scale,
            w.pre,
        )
        fused_draft(self.ops, w, joined, self.ids, self.draft_position, self.kv, self.tables, MAX_KEYS, steps)

    def _layer(self, kind: str, heads: int) -> tuple[LayerShape, Any]:
        width = 256 if kind == "sliding" else 512
        names = ("input_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm")
        weights = SimpleNamespace(
            qkv=self._linear(DRAFTER.hidden, heads * width, self.bits),
            o=self._linear(heads * width, DRAFTER.hidden, self.bits),
            gate_up=self._linear(DRAFTER.hidden, 2 * DRAFTER.inner, self.bits),
            down=self._linear(DRAFTER.inner, DRAFTER.hidden, self.bits),
            norm_heads=self._floats(heads, width),
            layer_scalar=self._halves(1),
            **{name: self._floats(DRAFTER.hidden) for name in names},
        )
        return LayerShape("sliding" if kind == "sliding" else "full", heads, 0, width, False), weights

    def _linear(self, width: int, features: int, bits: int) -> Linear:
        self.used.add((width, features, bits))
        shape = self.shapes.get((width, features, bits)) or launch_shape(width, features, bits)
        tiles, groups = -(-features // shape.tile), width // GROUP
        size = (tiles, groups, shape.tile)
        if bits == 16:
            codes, scales = self._halves(*size, GROUP), torch.empty(0, dtype=torch.int32, device=self.device)
        else:
            codes = torch.empty(*size, GROUP * bits // 8, dtype=torch.uint8, device=self.device)
            scales = torch.empty(size, dtype=torch.int32, device=self.device)
            if self.filled:
                codes.random_(0, 256)
                scales.fill_(SCALE_AND_BIAS)
        packed = PackedWeight(codes, scales, features, width, bits, shape)
        self.nbytes += packed.nbytes
        return Linear(features, width, bits, torch.bfloat16, "qmv", packed)

    def _screen(self) -> Screen:
        rows = self.weights.head.out_features
        if not self.filled:
            return Screen(self._linear(DRAFTER.hidden, rows, 8), self._floats(1))
        matrix = (DRAFTER.hidden, rows, 8)
        self.used.add(matrix)
        screen = screen_of(self.weights.head, self.shapes.get(matrix))
        assert screen is not None
        self.nbytes += screen.weight.nbytes
        return screen

    def _floats(self, *size: int) -> Tensor:
        out = torch.empty(*size, device=self.device)
        return out.normal_() if self.filled else out

    def _halves(self, *size: int) -> Tensor:
        out = torch.empty(*size, dtype=torch.bfloat16, device=self.device)
        return out.normal_(0, 0.05) if self.filled else out


def forms(bits: int) -> dict[str, FusedOps]:
    """Ops of other forms of a step, by name; bits: of the drafter's matrices."""
    sizes = PER_PROGRAM if bits == 16 else ()
    return {
        "late": draft_ops(()),
        "queries apart": replace(FUSED_DRAFT, attend_sums=None),
        "GeGLU apart": replace(FUSED_DRAFT, gated=releasing({"gated": "early"}).gated),
        "late, all apart": LATE,
        **{
            f"gated {size}": replace(FUSED_DRAFT, gated=partial(gated, per_program=size, release="early"))
            for size in sizes
        },
    }


def launches(target: Geometry, bits: int, steps: int, ops: FusedOps = FUSED_DRAFT) -> list[Variant]:
    """Launches of a chain of so many steps; they are noted, and nothing runs."""
    chain = Chain(target, bits, "cpu", {}, filled=False).with_ops(ops)
    with recorded_launches(90) as found:
        chain.run(steps)
        return found


def recorded(chain: Chain, steps: int) -> Callable[[], object]:
    """The chain as a graph."""
    chain.run(steps)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run(steps)
    return graph.replay


def step_us(chain: Chain, replay: Callable[[], object], steps: int, repeats: int) -> float:
    """Microseconds per step: the median of so many replays, each a position on."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    chain.position.fill_(CONTEXT)
    for begin, end in marks:
        begin.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e3 / steps for begin, end in marks)


def tokens(chain: Chain, replay: Callable[[], object]) -> list[int]:
    """The ids that a replay leaves at the first position."""
    for words, value in ((chain.position, CONTEXT), (chain.ids, 3)):
        words.fill_(value)
    replay()
    found: list[int] = chain.ids.tolist()
    return found


def shape_of(text: str) -> tuple[Matrix, LaunchShape]:
    """8192x1024-4bit=64,1,4,2,16 -> the matrix and its launch shape; ArgumentTypeError for another form."""
    name, _, sizes = text.partition("=")
    matrix = matrix_of(name)
    try:
        tile, unroll, stages, warps, split = map(int, sizes.split(","))
        shape = LaunchShape(tile, unroll, stages, warps, split)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}; expected KxN-Bbit=tile,unroll,stages,warps,split") from None
    if matrix is None or matrix[0] // GROUP % unroll:
        raise argparse.ArgumentTypeError(f"{text}: {name} is no matrix that {sizes} fits")
    return matrix, shape


def main() -> int:
    """Returns 2 without a GPU, or where the interpreter runs the kernels; 1 where a form changes a token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], choices=MODELS, help="this model's drafter alone")
    parser.add_argument("--shape", action="append", default=[], type=shape_of, metavar="KxN-Bbit=SHAPE")
    parser.add_argument("--steps", type=int, default=3, choices=range(1, 8), help="steps of a chain (default 3)")
    parser.add_argument("--repeats", type=int, default=200, help="replays of each of five turns (default 200)")
    parser.add_argument("--forms", action="store_true", help="time other forms of a step, too")
    parser.add_argument(
        "--early", action="append", default=[], nargs="*", choices=EARLY_IN_DRAFTS, metavar="OP", help=EARLY
    )
    parser.add_argument("--launches", action="store_true", help="count launches instead")
    args = parser.parse_args()
    if INTERPRETED.value:
        print("time_draft: TRITON_INTERPRET is set, nothing here would be a GPU's; unset it", file=sys.stderr)
        return 2
    models = {name: MODELS[name] for name in args.model or MODELS}
    if args.launches:
        for name, (target, bits) in models.items():
            for which, ops in {"table": FUSED_DRAFT, **(forms(bits) if args.forms else {})}.items():
                print(f"{name} {which}: {len(launches(target, bits, args.steps, ops))} launches in {args.steps} steps")
        return 0
    if not torch.cuda.is_available():
        print("time_draft: needs a CUDA device, or --launches", file=sys.stderr)
        return 2
    rate = stream_gb_per_s()
    print(f"read-only stream {rate:.0f} GB/s")
    for name, (target, bits) in models.items():
        chains = {"table": Chain(target, bits, "cuda", {})}
        tried = {matrix: shape for matrix, shape in args.shape if matrix in chains["table"].used}
        if absent := [f"{k}x{n}-{b}bit" for (k, n, b), _ in args.shape if (k, n, b) not in tried]:
            print(f"{name}: not in this chain: {', '.join(absent)}")
        if tried:
            chains["tried"] = Chain(target, bits, "cuda", tried)
        others: dict[str, FusedOps] = forms(bits) if args.forms else {}
        others |= {f"early {'+'.join(names)}".rstrip(): draft_ops(names) for names in args.early}
        chains |= {which: chains["table"].with_ops(ops) for which, ops in others.items()}
        if args.forms and bits == 16:
            chains["head whole"] = chains["table"].with_whole_head()
        replays = {which: recorded(chain, args.steps) for which, chain in chains.items()}
        times: dict[str, list[float]] = {which: [] for which in chains}
        for _ in range(5):
            for which, chain in chains.items():
                times[which].append(step_us(chain, replays[which], args.steps, args.repeats))
        wanted = tokens(chains["table"], replays["table"])
        for which, chain in chains.items():
            if which != "tried" and (found := tokens(chain, replays[which])) != wanted:
                print(f"time_draft: {name} {which}: tokens {found}, not {wanted}", file=sys.stderr)
                return 1
            floor = chain.nbytes / rate / 1e3
            print(
                f"{name} {which}: {statistics.median(times[which]):.1f} us a step"
                f" ({min(times[which]):.1f} to {max(times[which]):.1f}), {floor:.1f} of it the bytes' floor",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
