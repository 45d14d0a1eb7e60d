"""Measures launch shapes of `qmv` on a GPU and prints rows for the table in `kernels/launch.py`.

    python -m tools.tune_qmv                                  # every matrix of the table, some seconds each
    python -m tools.tune_qmv --only 8192x5376-4bit --wide     # one matrix, more candidates
    python -m tools.tune_qmv --only 1024x262144-16bit         # one that is not in the table yet

Candidates are timed at one row as graphs of calls over rotated weights (codes, scales and all, over 1 GB, so that no
byte is found in a cache); the best ones again at one, four and eight rows. The first whose eight rows cost at most
--flat times its one row is printed with its share of the read-only stream. Tables change bytes: after a new table the
records of before it compare with other kernels.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from kernels.gate.record import Variant, recorded_launches
from kernels.launch import GROUP, TABLE, LaunchShape, even_split, launch_shape
from kernels.qmv import qmv
from kernels.repack import PackedWeight
from kernels.rows import Rows, new_rows
from kernels.stream import stream_read

Matrix = tuple[int, int, int]
MOST_PROGRAMS = 132 * 13
"""Where K is split: about what fits a card at once."""

ROTATED_BYTES = 1_050_000_000
FORMS = {
    4: ((64, 1, 2), (128, 1, 2), (64, 1, 1), (256, 1, 4), (256, 2, 4), (128, 2, 2)),
    8: ((64, 1, 2), (128, 1, 4), (256, 1, 4), (64, 1, 1)),
    16: ((64, 1, 2), (128, 1, 4), (64, 2, 2), (64, 1, 4), (32, 1, 1)),
}
WIDER = {
    4: ((32, 1, 1), (64, 2, 2), (128, 2, 4), (128, 1, 4), (128, 1, 1)),
    8: ((32, 1, 1), (128, 2, 4), (128, 1, 2), (64, 2, 2)),
    16: ((32, 1, 2), (32, 2, 2), (128, 1, 2), (128, 2, 4), (256, 1, 4)),
}
"""(tile, unroll, warps) worth trying, by bits."""


def matrix_of(name: str) -> Matrix | None:
    """8192x5376-4bit -> its K, N and bits; None for another form."""
    found = re.fullmatch(r"(\d+)x(\d+)-(\d+)bit", name)
    if found is None:
        return None
    width, rows, bits = map(int, found.groups())
    return (width, rows, bits) if width and width % GROUP == 0 and rows >= 32 and bits in FORMS else None


def candidates(matrix: Matrix, wide: bool) -> Iterator[LaunchShape]:
    """Launch shapes that fill a card once or a few times."""
    width, rows, bits = matrix
    groups = width // GROUP
    for tile, unroll, warps in FORMS[bits] + (WIDER[bits] if wide else ()):
        if groups % unroll or tile > rows:
            continue
        steps, tiles = groups // unroll, -(-rows // tile)
        for split in range(1, 33):
            if (
                even_split(steps, split) != split
                or (split > 1 and tiles * split > MOST_PROGRAMS)
                or tiles * split < min(200, tiles * steps)
            ):
                continue
            for stages in (2, 3, 4) if unroll == 1 else (2, 3):
                yield LaunchShape(tile, unroll, stages, warps, split)


def dummy_weight(matrix: Matrix, shape: LaunchShape, codes: torch.Tensor, scales: torch.Tensor) -> PackedWeight:
    """A matrix whose packed form is a view of random memory: what is timed does not depend on the values."""
    width, rows, bits = matrix
    groups, tiles, stored = width // GROUP, -(-rows // shape.tile), GROUP * bits // 8
    size = tiles * groups * shape.tile
    held = codes[: size * stored].view(tiles, groups, shape.tile, stored)
    return PackedWeight(
        held.view(torch.bfloat16) if bits == 16 else held,
        scales[:0] if bits == 16 else scales[:size].view(tiles, groups, shape.tile),
        rows,
        width,
        bits,
        shape,
    )


def median_us(run: Callable[[], object], calls: int, repeats: int) -> float:
    """Microseconds per call of a captured graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e3 / calls for begin, end in marks)


class Memory:
    """Random codes and scales that all matrices share, larger than any cache."""

    def __init__(self, largest: int) -> None:
        self.codes = torch.randint(0, 256, (max(ROTATED_BYTES, 2 * largest),), dtype=torch.uint8, device="cuda")
        count = self.codes.numel() // 32
        scale = (torch.rand(count, device="cuda") * 0.01 + 1e-3).to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
        bias = (torch.randn(count, device="cuda") * 0.05).to(torch.bfloat16).view(torch.int16).int() << 16
        self.scales = bias | scale

    def time(self, matrix: Matrix, shape: LaunchShape, m: int, repeats: int = 7) -> float:
        """Microseconds of one product of m rows."""
        width, rows, bits = matrix
        groups = width // GROUP
        padded = -(-rows // shape.tile) * shape.tile
        size, stored = padded * groups, GROUP * bits // 8
        copies = max(2, min(64, ROTATED_BYTES // (size * stored)))
        weights = [
            dummy_weight(matrix, shape, self.codes[i * size * stored :], self.scales[i * size :])
            for i in range(copies)
            if (i + 1) * size * stored <= self.codes.numel()
        ]
        x = random_rows(width, bits)
        out = torch.empty(shape.split, 8, rows, dtype=torch.float32, device="cuda")

        def run() -> None:
            for weight in weights:
                qmv(x, weight, m, out=out)

        return median_us(run, len(weights), repeats)


def random_rows(width: int, bits: int) -> Rows:
    """Rows of random values."""
    x = new_rows(width, bits, torch.device("cuda"))
    x.values.normal_()
    x.sums.normal_()
    x.scales.fill_(1.0)
    return x


def stream_gb_per_s() -> float:
    """Rate of the read-only stream."""
    data = torch.randint(0, 2**31 - 1, (1 << 28,), dtype=torch.int32, device="cuda")
    return data.numel() * 4 / median_us(lambda: stream_read(data), 1, 9) / 1e3


def compile_all(work: Sequence[tuple[Matrix, LaunchShape]], jobs: int) -> int:
    """Compile what these launches need, in processes that know no GPU; how many binaries that is."""
    global _VARIANTS
    with recorded_launches(90) as launches:
        for (width, rows, bits), shape in work:
            groups, tiles = width // GROUP, -(-rows // shape.tile)
            size = tiles * groups * shape.tile
            codes = torch.empty(size * GROUP * bits // 8, dtype=torch.uint8)
            weight = dummy_weight((width, rows, bits), shape, codes, torch.empty(size, dtype=torch.int32))
            qmv(new_rows(width, bits, torch.device("cpu")), weight, 1)
    _VARIANTS = list({id(variant): variant for variant in launches}.values())
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        list(pool.map(_compile, range(len(_VARIANTS)), chunksize=4))
    return len(_VARIANTS)


_VARIANTS: list[Variant] = []


def _compile(index: int) -> None:
    _VARIANTS[index].compile(90)


def tune(memory: Memory, matrix: Matrix, wide: bool, flat: float, ceiling: float) -> None:
    """Print the table's row of one matrix, with what it was chosen from."""
    width, rows, bits = matrix
    nbytes = rows * width * bits // 8 + (rows * width // GROUP * 4 if bits < 16 else 0)
    shapes = list(candidates(matrix, wide)) or [
        launch_shape(*matrix)
    ]  # none fills a card: the default is what there is
    timed = sorted((memory.time(matrix, shape, 1), repr(shape), shape) for shape in shapes)
    known = TABLE.get(matrix)
    best = [shape for _, _, shape in timed[:8]]
    again = []
    for shape in [*best, *([known] if known is not None and known not in best else [])]:
        times = [min(memory.time(matrix, shape, m, 25) for _ in range(2)) for m in (1, 4, 8)]
        again.append((times, shape))
    again.sort(key=lambda item: item[0][0])
    chosen = next(((times, shape) for times, shape in again if times[2] <= flat * times[0]), again[0])
    for mark, (times, shape) in (("best", chosen), *(("now ", item) for item in again if item[1] == known)):
        share = nbytes / times[0] / 1e3 / ceiling
        values = f"{shape.tile}, {shape.unroll}, {shape.stages}, {shape.warps}, {shape.split}"
        print(
            f"{mark} ({width}, {rows}, {bits}): LaunchShape({values}),  # {times[0]:.2f} us, {share:.3f} of the stream,"
            f" M = 8 {times[2] / times[0]:.3f}",
            flush=True,
        )


def main() -> int:
    """Returns 2 without a GPU or for what names no matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="KxN-Bbit", help="this matrix alone")
    parser.add_argument("--wide", action="store_true", help="more candidates")
    parser.add_argument("--flat", type=float, default=1.033, help="largest time of eight rows over one (default 1.033)")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile first (default 8)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune_qmv: needs a CUDA device", file=sys.stderr)
        return 2
    if unknown := [name for name in args.only if matrix_of(name) is None]:
        wanted = f"KxN-Bbit, K a multiple of {GROUP}, N at least 32, B one of {', '.join(map(str, FORMS))}"
        print(f"tune_qmv: no matrix: {', '.join(unknown)}; expected {wanted}", file=sys.stderr)
        return 2
    matrices = [matrix for name in args.only if (matrix := matrix_of(name))] or list(TABLE)
    work = [(matrix, shape) for matrix in matrices for shape in candidates(matrix, args.wide)]
    began = time.perf_counter()
    count = compile_all(work, args.jobs)
    print(f"{count} binaries for {len(work)} candidates in {time.perf_counter() - began:.0f} s", flush=True)
    memory = Memory(max(k * n * bits // 8 for k, n, bits in matrices))
    ceiling = stream_gb_per_s()
    print(f"read-only stream {ceiling:.0f} GB/s")
    for matrix in matrices:
        tune(memory, matrix, args.wide, args.flat, ceiling)
    return 0


if __name__ == "__main__":
    sys.exit(main())
