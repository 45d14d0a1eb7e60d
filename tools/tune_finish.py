"""Products that finish their own sums against ones that leave them to their consumers (`tune_qmv --finish`).

What counts is product and consumer together, so chains are timed, over rotated weights, as CUDA graphs that take turns:
qkv and head norms, o and residual norm, gate_up with GeGLU and down, down and residual norm, for 12B and 31B. First the
table's launch shape with and without finishing, whose outputs must have the same bytes; then other shapes that finish.
A printed shape goes into the table in `kernels/launch.py` by hand; another split has other bytes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch
from torch import Tensor

from kernels.fused_norms import residual_norm_rows
from kernels.gate.cases import GEOMETRIES, Attention, Geometry
from kernels.jit import GROUP, SLOTS
from kernels.launch import TABLE, Finish, LaunchShape, even_split, launch_shape
from kernels.products import Squared, gated_product, product, sums_of
from kernels.repack import PackedWeight
from kernels.rope import head_norms_rope
from kernels.rows import Rows
from kernels.testing import same_bytes
from tools.tune_qmv import FORMS, ROTATED_BYTES, Matrix, Memory, dummy_weight, random_rows

Clock = Callable[[Sequence[Callable[[], object]], int], list[float]]
"""Microseconds of each run per call; a run makes so many calls."""

ROWS = (1, 4, 8)
TURNS = 15
POSITIONS = 1031
EPS = 1e-6


@dataclass(frozen=True)
class Chain:
    """A matrix, how its product may finish, and what follows it: heads of a layer, a second matrix, or a norm."""

    name: str
    matrix: Matrix
    finish: Finish
    heads: Attention | None = None
    then: Matrix | None = None
    bits_after: int = 4


def chains(models: Sequence[Geometry]) -> Iterator[Chain]:
    """The chains of a decoder layer of each model; layers of a kind share theirs."""
    for model in models:
        gate_up = (model.hidden, 2 * model.inner, model.mlp_bits)
        down = (model.inner, model.hidden, model.mlp_bits)
        for layer in model.layers:
            heads = layer.heads + layer.kv_heads * (1 if layer.k_eq_v else 2)
            qkv = (model.hidden, heads * layer.width, model.bits)
            yield Chain(f"{model.name} {layer.name} qkv, heads", qkv, "sum", heads=layer)
            o = (layer.heads * layer.width, model.hidden, model.bits)
            yield Chain(f"{model.name} {layer.name} o, residual", o, "squares", bits_after=model.mlp_bits)
        yield Chain(f"{model.name} gate_up, geglu, down", gate_up, "gated", then=down, bits_after=model.mlp_bits)
        yield Chain(f"{model.name} down, residual", down, "squares", bits_after=model.bits)


def candidates(chain: Chain) -> list[LaunchShape]:
    """Launch shapes that finish, the table's own first: its split and others around it, and other tiles."""
    width, columns, bits = chain.matrix
    known = launch_shape(*chain.matrix)
    found = [replace(known, finish=chain.finish)]
    forms = [(known.tile, known.unroll, known.warps), *(form for form in FORMS[bits] if form[2] > 1)]
    for tile, unroll, warps in dict.fromkeys(forms):
        whole = tile % GROUP == 0 and columns % (2 * tile) == 0
        if (width // GROUP) % unroll or tile > columns or (chain.finish == "gated" and not whole):
            continue
        steps = width // GROUP // unroll
        splits = {round(known.split * tile / known.tile * share) for share in (0.5, 0.75, 1, 1.4, 2)}
        for split in sorted({even_split(steps, min(max(size, 1), steps)) for size in splits}):
            if split > 1 or chain.finish == "gated":
                found.append(LaunchShape(tile, unroll, known.stages, warps, split, chain.finish))
    if chain.finish == "gated":
        found += [replace(shape, finish="gated late") for shape in found]
    return list(dict.fromkeys(found))


def unfinished(chain: Chain) -> LaunchShape:
    """The table's launch shape with the sums left to the consumer."""
    return replace(launch_shape(*chain.matrix), finish="no")


class Bench:
    """A chain over rotated weights; what it runs follows from the first matrix's launch shape alone."""

    def __init__(self, chain: Chain, memory: Memory) -> None:
        self.chain, self.memory, self.device = chain, memory, str(memory.codes.device)
        width, columns, bits = chain.matrix
        self.x = random_rows(width, bits, self.device)
        self.residual = torch.randn(SLOTS, columns, device=self.device).to(torch.bfloat16)
        self.norm = torch.rand(columns, device=self.device) + 0.5
        if chain.heads is not None:
            size = chain.heads.width
            self.norm_heads = torch.rand(columns // size, size, device=self.device) + 0.5
            self.cos, self.sin = torch.rand(2, POSITIONS, size, device=self.device).unbind()
            self.kv = torch.zeros(2, chain.heads.kv_heads, POSITIONS, size, dtype=torch.bfloat16, device=self.device)
            self.position = torch.full((1,), POSITIONS // 2, dtype=torch.int32, device=self.device)

    def weights(self, shape: LaunchShape) -> list[tuple[PackedWeight, PackedWeight | None]]:
        """The chain's matrices, again and again at other places of the memory, until they are no more in a cache."""
        then = self.chain.then
        sizes = [
            _padded_bytes(self.chain.matrix, shape),
            0 if then is None else _padded_bytes(then, launch_shape(*then)),
        ]
        copies = max(1, min(64, self.memory.codes.numel() // sum(sizes)))
        return [
            (
                self._weight(self.chain.matrix, shape, place * sum(sizes)),
                None if then is None else self._weight(then, launch_shape(*then), place * sum(sizes) + sizes[0]),
            )
            for place in range(copies)
        ]

    def _weight(self, matrix: Matrix, shape: LaunchShape, start: int) -> PackedWeight:
        stored = GROUP * matrix[2] // 8
        return dummy_weight(matrix, shape, self.memory.codes[start:], self.memory.scales[start // stored :])

    def call(self, first: PackedWeight, second: PackedWeight | None, m: int) -> list[Tensor]:
        """The chain once, as the engine's fused ops run it -> what it leaves, by row."""
        chain = self.chain
        if second is not None:
            gated = gated_product(self.x, first, m, chain.bits_after, fused=True)
            return [*_by_row(gated), *product_sums(gated, second, m)]
        y = product(self.x, first, m)
        if chain.heads is not None:
            return [self._heads(sums_of(y), chain.heads, m)]
        squares = y.squares if isinstance(y, Squared) else None
        h, after = residual_norm_rows(
            sums_of(y), self.residual, self.norm, None, self.norm, EPS, m, chain.bits_after, squares=squares
        )
        assert after is not None
        return [h, *_by_row(after)]

    def _heads(self, sums: Tensor, layer: Attention, m: int) -> Tensor:
        return head_norms_rope(
            sums,
            self.norm_heads,
            self.cos,
            self.sin,
            self.position,
            m,
            layer.heads,
            layer.kv_heads,
            layer.k_eq_v,
            EPS,
            self.kv[0],
            self.kv[1],
            POSITIONS,
        )

    def differs(self, shape: LaunchShape) -> bool:
        """Whether finishing changes a byte of what the chain leaves, or of the sums before their rounding."""
        plain, fine = (self.weights(x)[0] for x in (replace(shape, finish="no"), shape))
        for m in ROWS:
            pairs = list(zip(self.call(*plain, m), self.call(*fine, m), strict=True))
            pairs.append((self._added(plain[0], m), self._added(fine[0], m)))
            if not all(same_bytes(a[:m].contiguous(), b[:m].contiguous()) for a, b in pairs):
                return True
        return False

    def _added(self, weight: PackedWeight, m: int) -> Tensor:
        """The product's sums in index order, fp32 [8, N]."""
        first, *others = sums_of(product(self.x, weight, m)).unbind()
        return sum(others, start=first)

    def times(self, shapes: Sequence[LaunchShape], m: int, clock: Clock) -> list[float]:
        """Microseconds of the chain with each launch shape of its first matrix, in turns."""
        weights = [self.weights(shape) for shape in shapes]
        calls = min(map(len, weights))  # another tile pads otherwise

        def run(pairs: list[tuple[PackedWeight, PackedWeight | None]]) -> Callable[[], None]:
            def all_calls() -> None:
                for first, second in pairs[:calls]:
                    self.call(first, second, m)

            return all_calls

        return clock([run(pairs) for pairs in weights], calls)


def product_sums(x: Rows, weight: PackedWeight, m: int) -> list[Tensor]:
    """A product's sums, by row."""
    return [sums_of(product(x, weight, m)).transpose(0, 1)]


def _by_row(x: Rows) -> list[Tensor]:
    return [x.values, x.sums.T]


def _padded_bytes(matrix: Matrix, shape: LaunchShape) -> int:
    width, columns, bits = matrix
    return -(-columns // shape.tile) * shape.tile * width * bits // 8


def in_turns(runs: Sequence[Callable[[], object]], calls: int) -> list[float]:
    """Graphs of the runs, replayed one after the other, again and again: the median of each."""
    graphs, marks = [], []
    for run in runs:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        graphs.append(graph)
    for _ in range(TURNS):
        for graph in graphs:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            marks.append((begin, end))
    torch.cuda.synchronize()
    took = [begin.elapsed_time(end) * 1e3 / calls for begin, end in marks]
    return [statistics.median(took[index :: len(graphs)]) for index in range(len(graphs))]


def compare(chain: Chain, memory: Memory, clock: Clock) -> list[str]:
    """Lines of the table for a chain: unfinished, finished with the table's shape, finished with the best shape."""
    bench, known = Bench(chain, memory), unfinished(chain)
    shapes = candidates(chain)
    if bench.differs(shapes[0]):
        raise ArithmeticError(f"{chain.name}: finished and unfinished products leave different bytes")
    alone = bench.times([known, *shapes], 1, clock)
    best = min(zip(alone[1:], range(len(shapes)), strict=True))[1]
    if best and bench.differs(shapes[best]):
        raise ArithmeticError(f"{chain.name}: {_words(shapes[best])} leaves other bytes than the unfinished product")
    lines = []
    for m in ROWS:
        old, same, other = bench.times([known, shapes[0], shapes[best]], m, clock)
        lines.append(
            f"{chain.name:28} {m}  {old:8.2f}  {_change(same, old)}  {_change(other, old)}  {_words(shapes[best])}"
        )
    return lines


def _change(new: float, old: float) -> str:
    return f"{new:8.2f} {100 * (new / old - 1):+6.1f} %"


def _words(shape: LaunchShape) -> str:
    return f'{shape.tile}, {shape.unroll}, {shape.stages}, {shape.warps}, {shape.split}, "{shape.finish}"'


def to_compile(chosen: Sequence[Chain]) -> tuple[list[tuple[Chain, LaunchShape]], list[tuple[Chain, LaunchShape]]]:
    """Runs that need every product's binary, one each; and runs that need every consumer's, once those are there."""
    work = [(chain, shape) for chain in chosen for shape in (unfinished(chain), *candidates(chain))]
    products = {(chain.matrix[2], chain.bits_after, replace(shape, split=1)): (chain, shape) for chain, shape in work}
    consumers = {(chain, shape.tile, shape.finish): (chain, shape) for chain, shape in work}
    return list(products.values()), list(consumers.values())


def warm(work: Sequence[tuple[Chain, LaunchShape]], device: str = "cuda") -> None:
    """Compile a share of the chains by running each once."""
    for chain, shape in work:
        largest = max(_padded_bytes(x, shape) for x in (chain.matrix, chain.then) if x is not None)
        bench = Bench(chain, Memory(largest, 0, device))
        bench.call(*bench.weights(shape)[0], 1)


def main(only: Sequence[Matrix], jobs: int) -> int:
    """Print the table; 1 where finishing changes bytes, 2 where no chain starts with a matrix that was asked for."""
    chosen = [chain for chain in chains(GEOMETRIES[:2]) if not only or chain.matrix in only]
    if not chosen:
        print("tune_qmv: no chain of 12B or 31B starts with that matrix", file=sys.stderr)
        return 2
    products, consumers = to_compile(chosen)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for work in (products, consumers):
            list(pool.map(warm, [work[i::jobs] for i in range(jobs)]))
    memory = Memory(max(_padded_bytes(chain.matrix, TABLE[chain.matrix]) for chain in chosen), ROTATED_BYTES)
    print(f"{'chain, us':28} M  consumer   in the product      with another launch shape")
    try:
        for chain in chosen:
            print("\n".join(compare(chain, memory, in_turns)), flush=True)
    except ArithmeticError as error:
        print(f"tune_qmv: {error}", file=sys.stderr)
        return 1
    return 0
