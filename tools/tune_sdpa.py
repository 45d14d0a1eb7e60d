"""Measures plans of attention on a GPU: which layer types meet the bars for the stream and for M = 4, and with which.

    python -m tools.tune_sdpa                               # every layer type, all candidates
    python -m tools.tune_sdpa --only 12b-full --limit 90    # one layer type, what fits into 90 s after compiling
    python -m tools.tune_sdpa --only 12b-full --out plans.jsonl

Plans are compiled in parallel first. Then each must keep its rows' bytes (M = 8 and M = 3 against one-row calls, NaN in
the slots nobody asked for) and be close to float64, before graphs of calls over rotated caches are timed at 1, 4 and 8
rows. Nothing is chosen here: a plan in `kernels/sdpa_plan.py` is a plan's bytes, so records of before a change compare
with other kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from kernels import MAX_ROWS
from kernels.sdpa_plan import PLANS, Plan, Scratch, allocate_scratch
from kernels.sdpa_vector import sdpa_vector
from kernels.stream import LAUNCHES, stream_read
from kernels.testing import same_bytes
from tools.tune_qmv import median_us

ROTATED_BYTES = 600_000_000
ROWS = (1, 4, 8)
AGAIN = 100
"""Calls that must all have the same bytes."""

ERROR = 4e-3
"""Most ||found - exact|| / ||exact||, of which the output's rounding is 1.7e-3 and that of the weights the rest."""

SHARE, FLAT = 0.6, 1.35
"""The bars: one row of a full layer at 32K over the stream, and M = 4 over M = 1 at 2K and 8K."""


@dataclass(frozen=True)
class Layer:
    """One layer type: query heads, KV heads, head_dim, window, contexts to time."""

    heads: int
    groups: int
    width: int
    window: int | None
    contexts: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Key of the table of plans."""
        return self.width, self.heads, self.groups

    def ring(self, context: int) -> int:
        """Slots of a cache in which rows at `context` and after have their keys."""
        return context + MAX_ROWS if self.window is None else self.window + 7

    def nbytes(self, context: int) -> int:
        """Bytes of keys and values that one row sees."""
        keys = context + 1 if self.window is None else min(self.window, context + 1)
        return keys * self.groups * self.width * 4


LAYERS = {
    "12b-full": Layer(16, 1, 512, None, (2048, 8192, 32768)),
    "31b-full": Layer(32, 4, 512, None, (2048, 8192, 32768)),
    "12b-sliding": Layer(16, 8, 256, 1024, (512, 2048)),
    "31b-sliding": Layer(32, 16, 256, 1024, (512, 2048)),
}

SPLIT = Plan(64, 512, 64, 4, 3, block=64, step=64, part=128, block_stages=3)
SCALED = replace(SPLIT, scaled=True, registers=168)
"""Three programs a multiprocessor."""

SMALL = replace(SCALED, part=64, registers=128)
"""Four of them."""

FULL = (
    SPLIT,
    SCALED,
    SMALL,
    *(
        replace(plan, slots=slots, block_slots=16, chunk=chunk, stages=stages, step=step, ahead=ahead)
        for plan, chunk, stages in (
            (SMALL, 256, 4),
            (SMALL, 512, 3),
            (SMALL, 512, 4),
            (SCALED, 512, 3),
            (SMALL, 1024, 6),
        )
        for slots in (16, 64)
        for step in (64, 128)
        for ahead in (0, 4)
    ),
)
WHOLE = Plan(16, 64, 64, 4, 2)
SLIDING = (
    *(
        replace(WHOLE, warps=warps, chunk=chunk, inner=inner, stages=stages, registers=registers)
        for warps, bound in ((2, 0), (4, 168), (8, 80))
        for chunk, inner in ((16, 16), (32, 32), (64, 32), (64, 64))
        for stages in ((1,) if inner == chunk else (1, 2, 3))
        for registers in dict.fromkeys((0, bound))
        if inner >= 4 * warps
    ),
    replace(SCALED, slots=16, chunk=128, step=128),
    replace(SCALED, slots=16, chunk=256, step=128),
)


def candidates(layer: Layer) -> list[Plan]:
    """The plan in use, then what is worth a try."""
    found = [PLANS[layer.shape], *(FULL if layer.window is None else SLIDING)]
    return [plan for plan in dict.fromkeys(found) if plan.slots >= layer.heads // layer.groups]


def words(plan: Plan) -> str:
    """A plan in a few words."""
    form = "scaled" if plan.scaled else "split" if plan.block else "whole"
    parts = f"{form:6} {plan.slots:2} slots, chunk {plan.chunk:4} by {plan.inner}, {plan.warps} warps, stages "
    rest = {"registers": plan.registers}
    if not plan.block:
        return ", ".join([f"{parts}{plan.stages}", *(f"{name} {value}" for name, value in rest.items() if value)])
    parts += f"{plan.block_stages or plan.stages}+{plan.stages}, block {plan.block:3}, step {plan.step:3}"
    rest = {"tiles of": plan.block_slots, "part": plan.part, **rest, "ahead": plan.ahead}
    return ", ".join([parts, *(f"{name} {value:3}" for name, value in rest.items() if value)])


class Bench:
    """One layer type at one context: queries, and caches that are together larger than the L2."""

    def __init__(self, layer: Layer, context: int, rotated: int = ROTATED_BYTES, device: str = "cuda") -> None:
        self.layer, self.device = layer, device
        self.context = context
        self.first = context - MAX_ROWS // 2  # rows on both sides of an edge of blocks and chunks
        self.ring = layer.ring(context)
        copies = max(2, min(48, -(-rotated // layer.nbytes(context))))
        generator = torch.Generator(device).manual_seed(context)

        def random(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(size, generator=generator, device=device) * scale).to(torch.bfloat16)

        self.q = random(MAX_ROWS, layer.heads, layer.width, scale=layer.width**-0.5)
        size = layer.groups, self.ring, layer.width
        first = random(*size), random(*size)
        self.caches = [first, *((first[0].clone(), first[1].clone()) for _ in range(copies - 1))]
        self.places = [torch.tensor([self.first + row], dtype=torch.int32, device=device) for row in range(MAX_ROWS)]
        self.exact = self._exact()

    def _exact(self) -> Tensor:
        """float64 attention of the 8 rows [8, H, D], one at a time."""
        layer = self.layer
        repeats = layer.heads // layer.groups
        k, v = self.caches[0]
        rows = []
        for row in range(MAX_ROWS):
            end = self.first + row + 1
            start = 0 if layer.window is None else max(0, end - layer.window)
            slots = torch.arange(start, end, device=self.device) % self.ring
            q = self.q[row].double().view(layer.groups, repeats, layer.width)
            weights = torch.einsum("ghd,gkd->ghk", q, k[:, slots].double()).softmax(-1)
            rows.append(torch.einsum("ghk,gkd->ghd", weights, v[:, slots].double()).reshape(layer.heads, layer.width))
        return torch.stack(rows)

    def scratch(self, plan: Plan) -> Scratch:
        """Room for a plan's partials."""
        layer = self.layer
        keys = self.first + MAX_ROWS
        return allocate_scratch(layer.heads, layer.groups, layer.width, layer.window, keys, self.device, plan)

    def call(
        self, plan: Plan, scratch: Scratch, rows: int, row: int = 0, copy: int = 0, out: Tensor | None = None
    ) -> Tensor:
        """Rows from row `row` on; the slots of the others hold NaN."""
        q = torch.full_like(self.q, float("nan"))
        q[:rows] = self.q[row : row + rows]
        keys = self.first + MAX_ROWS
        operands = (q, *self.caches[copy], self.places[row], rows, self.layer.window, self.ring, keys)
        return sdpa_vector(*operands, out=out, scratch=scratch, plan=plan, settled=True)

    def wrong(self, plan: Plan) -> str | None:
        """What is wrong with a plan's rows; None when all is well."""
        scratch = self.scratch(plan)
        alone: list[Tensor] = []
        for row in range(MAX_ROWS):
            alone.append(self.call(plan, scratch, 1, row)[0].clone())
            if not bool(alone[-1].isfinite().all()):
                return f"row alone at {self.first + row} is not finite"
        for count, row in ((8, 0), (3, 2), (8, 0)):
            found = self.call(plan, scratch, count, row)
            for index in range(count):
                if not same_bytes(found[index], alone[row + index]):
                    return f"row {index} of {count} at {self.first + row} has not its one-row call's bytes"
        error = float((torch.stack(alone).double() - self.exact).norm() / self.exact.norm())
        if not error <= ERROR:
            return f"error {error:.1e} at {self.first}"
        for _ in range(AGAIN if self.device == "cuda" else 1):
            for held in (scratch.block_state, scratch.weights, scratch.chunk_state, scratch.acc):
                held.fill_(float("nan"))  # what is read before it is written must not be what the last call left
            if not same_bytes(self.call(plan, scratch, MAX_ROWS), found):
                return f"rows changed from call to call: {MAX_ROWS} at {self.first}"
        return None

    def time(self, plan: Plan, rows: int, repeats: int = 15) -> float:
        """Microseconds of a call of `rows` rows, in a graph of calls on one cache after another."""
        scratch, out = self.scratch(plan), torch.empty_like(self.q)
        keys = self.first + MAX_ROWS

        def run() -> None:
            for cache in self.caches:
                operands = (self.q, *cache, self.places[0], rows, self.layer.window, self.ring, keys)
                sdpa_vector(*operands, out=out, scratch=scratch, plan=plan, settled=True)

        return median_us(run, len(self.caches), repeats)


def stream_gb_per_s() -> float:
    """Rate of the fastest read-only stream."""
    data = torch.randint(0, 2**31 - 1, (1 << 28,), dtype=torch.int32, device="cuda")
    return max(
        data.numel() * 4 / median_us(partial(stream_read, data, None, launch), 1, 9) / 1e3 for launch in LAUNCHES
    )


def reason(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['without a word'])[0][:160]}"


def compile_plans(work: Sequence[tuple[Layer, Plan]]) -> list[str]:
    """Compile a share of the plans by running them on a short context; what failed, a line each."""
    failed = []
    for layer, plan in work:
        bench = Bench(layer, 64, rotated=0)
        try:
            bench.call(plan, bench.scratch(plan), 1)
            torch.cuda.synchronize()
        except Exception as error:  # a compiler error or too much shared memory: a finding about this plan
            failed.append(f"{words(plan)}: {reason(error)}")
    return failed


@dataclass
class Timed:
    """Microseconds of a plan by (context, rows), or what is wrong with it."""

    plan: Plan
    us: dict[tuple[int, int], float]
    wrong: str | None = None


def measure(layer: Layer, plans: Sequence[Plan], until: float) -> Iterator[Timed]:
    """Check, then time, every plan at every context; in two passes, of which the faster counts."""
    benches = [Bench(layer, context) for context in layer.contexts]
    for plan in plans:
        if time.monotonic() > until:
            yield Timed(plan, {}, "not measured: the time was up")
            continue
        timed = Timed(plan, {})
        try:
            timed.wrong = next((text for bench in benches if (text := bench.wrong(plan))), None)
            if timed.wrong is None:
                for _ in range(2):
                    for bench in benches:
                        for rows in ROWS:
                            at = bench.context, rows
                            timed.us[at] = min(timed.us.get(at, float("inf")), bench.time(plan, rows))
        except Exception as error:  # as when it was compiled; a fault of the device fails the next plan too
            timed.wrong = f"does not run: {reason(error)}"
        yield timed


def judge(layer: Layer, timed: Timed, ceiling: float) -> tuple[float, float, bool]:
    """Share of the stream at the longest context and one row, worst M = 4 over M = 1 at 2K and 8K, all bars met.

    Beyond its window a sliding layer's context does not matter: 2K stands for 8K.
    """
    longest = layer.contexts[-1]
    share = layer.nbytes(longest) / timed.us[longest, 1] / 1e3 / ceiling
    flat = max(timed.us[context, 4] / timed.us[context, 1] for context in (2048, 8192) if context in layer.contexts)
    return share, flat, flat <= FLAT and (layer.window is not None or share >= SHARE)


def report(name: str, layer: Layer, timed: Timed, ceiling: float, now: bool) -> dict[str, object]:
    """Print a plan's line; the same as JSON."""
    mark, figures = " ", timed.wrong or ""
    if timed.wrong is None:
        share, flat, met = judge(layer, timed, ceiling)
        mark = "*" if met else " "
        columns = [" ".join(f"{timed.us[context, rows]:6.1f}" for rows in ROWS) for context in layer.contexts]
        figures = f"{' |'.join(columns)} | {share:.2f} {flat:.2f}"
    print(f"{mark} {words(timed.plan):100} {'now' if now else '   '} | {figures}", flush=True)
    times = {str(context): [round(timed.us[context, rows], 3) for rows in ROWS] for context, _ in timed.us}
    return {"layer": name, "plan": vars(timed.plan), "us": times, "wrong": timed.wrong, "stream_gb_per_s": ceiling}


def main(arguments: list[str] | None = None) -> int:
    """Returns 2 without a GPU or for an unknown layer type, 1 when a plan's rows are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="LAYER", help=f"of {', '.join(LAYERS)}")
    parser.add_argument(
        "--limit", type=float, default=300, help="seconds after compiling in which plans are begun (default 300)"
    )
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile first (default 12)")
    parser.add_argument("--out", type=Path, help="file that gets a JSON line for each plan")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.only if name not in LAYERS]:
        print(f"tune_sdpa: no such layer type: {', '.join(unknown)}; known: {', '.join(LAYERS)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("tune_sdpa: needs a CUDA device", file=sys.stderr)
        return 2
    began = time.monotonic()
    names = options.only or list(LAYERS)
    work = [(LAYERS[name], plan) for name in names for plan in candidates(LAYERS[name])]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        shares = [work[i :: options.jobs] for i in range(options.jobs)]
        futures = [pool.submit(compile_plans, share) for share in shares]
        for future in futures:
            try:
                failed = future.result()
            except Exception as error:  # a process that died; its plans compile later, in turn
                failed = [f"a share of the plans: {reason(error)}"]
            for text in failed:
                print(f"does not compile: {text}")
    ceiling = stream_gb_per_s()
    print(f"compiled in {time.monotonic() - began:.0f} s; read-only stream {ceiling:.0f} GB/s")
    lines, wrong, until = [], False, time.monotonic() + options.limit
    for name in names:
        layer = LAYERS[name]
        bars = f"M4/M1 <= {FLAT}" + ("" if layer.window else f", share >= {SHARE}")
        print(f"{name}: us at M = {', '.join(map(str, ROWS))} for contexts {layer.contexts}, share, M4/M1; * : {bars}")
        for timed in measure(layer, candidates(layer), until):
            lines.append(report(name, layer, timed, ceiling, timed.plan == PLANS[layer.shape]))
            wrong |= timed.wrong is not None and timed.wrong.startswith(("row", "error"))
            if options.out:
                options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{time.monotonic() - began:.0f} s in all")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
