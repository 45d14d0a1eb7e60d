"""Times of single steps at one or more contexts: the inputs of the cost model, and of the byte floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from engine.cache import MARGIN
from engine.drafts import DraftedBlock, Drafts
from engine.prefill import run_prefill
from harness.record.lines import StepLine
from harness.worker.bench import DEFAULT_STAGE, Bench, Output, PromptInput
from harness.worker.floor import floor_line, stream_seconds

WARMUP = 3
CHAINED = 6  # classic steps of one sample where they run ahead; within the rows that can be dropped again
PAUSE_CYCLES = 12_000_000  # of the GPU, some 6 ms: longer than launching the recordings of a round takes


def run(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Args: prompt, contexts, block_sizes, samples. Sends a line per context, step and block size, and per draft count.

    A context is the prompt and classic's own continuation of it, so that the drafter sees real text. The kinds and
    sizes of step take turns inside each sample, so that drift of the machine falls on all of them alike. On a GPU the
    byte floor's inputs come along: the stream is read right here, between the same two cases.
    """
    contexts = sorted({max(int(count), 1) for count in args["contexts"]})
    text = continued(bench, bench.prompt(args["prompt"]), contexts[-1])
    stream = stream_seconds(bench.device) if bench.device.startswith("cuda") else None
    for count in contexts:
        context = text[:count]
        if stream is not None:
            out.line(floor_line(out.case, bench.at(DEFAULT_STAGE).target, len(context), stream))
        _time_context(bench, args, context, out)
    return {}


def continued(bench: Bench, prompt: PromptInput, count: int) -> list[int]:
    """`count` tokens of text: the prompt, and classic's own continuation where it is shorter."""
    missing = max(count - len(prompt.tokens), 0)
    if not missing:
        return list(prompt.tokens[:count])
    return [*prompt.tokens, *bench.classic(bench.request(prompt, missing, True)).tokens][:count]


@dataclass(frozen=True)
class _Plan:
    """One thing to time: its name and size in the record, the call over caches, rows it leaves there, steps in it, and
    what is taken off its time."""

    step: str
    rows: int
    call: Callable[[Any], object]
    leaves: int = 0
    steps: int = 1
    less: tuple[str, int] | None = None


def _plans(pair: Any, caches: Any, token: int, hidden: Any, block_sizes: Sequence[int]) -> Iterator[_Plan]:
    """What is timed at one context.

    Recorded steps are timed as decoding runs them, where the next step or round is launched before the host has looked:
    behind a pause, in which launches queue up; classic as a chain, a verify step behind its drafts, whose time is taken
    off.
    """
    target, drafter = pair.target, pair.drafter
    recorded = getattr(caches, "room", None) is not None
    if recorded:
        yield _Plan("classic", 1, lambda here: list(target.chain(token, here, CHAINED)), CHAINED, CHAINED)
    else:
        yield _Plan("classic", 1, lambda here: target.step([token], here, "classic"), 1)
    yield _Plan("classic_unpadded", 1, lambda here: target.unpadded_step(token, here), 1)

    def verify(size: int, here: Any) -> None:
        block: Sequence[int] = [token] * size
        if recorded and drafter is not None and size > 1:
            block = DraftedBlock(drafter.draft(token, hidden, target.shared_kv(here), size - 1))
        target.step(block, here, "verify")

    for size in block_sizes:
        behind = ("draft_round", size - 1) if recorded and drafter is not None and size > 1 else None
        yield _Plan("verify", size, partial(verify, size), size, less=behind)
    shared = target.shared_kv(caches) if drafter is not None else None

    def draft(count: int, here: Any) -> float | None:
        drafts = drafter.draft(token, hidden, shared, count)
        list(drafts)  # a look at them, so that their time is whole
        return drafts.seconds if isinstance(drafts, Drafts) else None

    for count in range(1, max(block_sizes)) if drafter is not None else ():
        yield _Plan("draft_round", count, partial(draft, count))


def _time_context(bench: Bench, args: dict[str, Any], context: list[int], out: Output) -> None:
    """Every step at one context, in turns."""
    pair = bench.at(DEFAULT_STAGE)
    caches = pair.target.new_caches()
    prefilled = run_prefill(pair.target, context, None, bench.prefill_chunk, caches)
    plans = list(_plans(pair, caches, prefilled.first_token, prefilled.hidden, args["block_sizes"]))
    seconds: dict[tuple[str, int], list[float]] = {(plan.step, plan.rows): [] for plan in plans}
    whole: dict[tuple[str, int], list[float]] = {(plan.step, plan.rows): [] for plan in plans}
    total = args["samples"] + WARMUP
    queued = getattr(caches, "room", None) is not None
    for sample in range(total):
        if sample % 8 == 0:
            out.progress(sample, total, "steps")
        for plan in plans:
            # Past the window no more than 7 rows can be dropped again, so a larger block gets a copy.
            here = caches if plan.leaves <= MARGIN else caches.clone()
            elapsed, own = _timed(partial(plan.call, here), bench.device, queued)
            if here is caches:
                caches.rollback(plan.leaves)
            if sample >= WARMUP:
                whole[plan.step, plan.rows].append(elapsed / plan.steps)
                seconds[plan.step, plan.rows].append(own if isinstance(own, float) else elapsed / plan.steps)
    for plan in plans:
        times = seconds[plan.step, plan.rows]
        if plan.less is not None:
            times = [max(both - part, 0.0) for both, part in zip(times, whole[plan.less], strict=True)]
        line = {
            "case": out.case,
            "step": plan.step,
            "rows": plan.rows,
            "context_tokens": len(context),
            "seconds": tuple(times),
        }
        out.line(StepLine.model_validate(line))


def _timed(step: Callable[[], object], device: str, queued: bool = False) -> tuple[float, object]:
    """Seconds of one call, the device's work included and that of the copy before it left out, and what it returned.

    `queued`: the device's own seconds, with what the host launches first queued up behind a pause, as behind the step
    or round before.
    """
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.synchronize()
    if on_gpu and queued:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(PAUSE_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        returned = step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3, returned
    began = time.perf_counter()
    returned = step()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began, returned
