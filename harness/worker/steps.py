"""Times of single steps at one or more contexts: the inputs of the cost model, and of the byte floor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from engine.prefill import run_prefill
from harness.record.lines import StepLine
from harness.worker.bench import DEFAULT_STAGE, Bench, Output, PromptInput
from harness.worker.floor import floor_line, stream_seconds

WARMUP = 3


def run(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Args: prompt, contexts, block_sizes, samples. Sends a line per context, step and block size.

    A context is the prompt and classic's own continuation of it, so that the drafter sees real text. The four kinds
    of step take turns inside each sample, so that drift of the machine falls on all of them alike. On a GPU the byte
    floor's inputs come along: the stream is read right here, between the same two cases.
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


def _time_context(bench: Bench, args: dict[str, Any], context: list[int], out: Output) -> None:
    """Every step at one context, in turns."""
    pair = bench.at(DEFAULT_STAGE)
    target, drafter = pair.target, pair.drafter
    caches = target.new_caches()
    prefilled = run_prefill(target, context, None, bench.prefill_chunk, caches)
    token, hidden = prefilled.first_token, prefilled.hidden

    def classic() -> None:
        target.step([token], caches, "classic")

    def unpadded() -> None:
        target.unpadded_step(token, caches)

    plans: list[tuple[str, int, Callable[[], None], int]] = [
        ("classic", 1, classic, 1),
        ("classic_unpadded", 1, unpadded, 1),
    ]
    for block_size in args["block_sizes"]:
        tokens = [token] * block_size

        def verify(tokens: list[int] = tokens) -> None:
            target.step(tokens, caches, "verify")

        plans.append(("verify", block_size, verify, block_size))
    deepest = max(args["block_sizes"]) - 1
    if drafter is not None:
        shared = target.shared_kv(caches)

        def draft() -> None:
            drafter.draft(token, hidden, shared, deepest)

        plans.append(("draft", deepest, draft, 0))
    seconds: list[list[float]] = [[] for _ in plans]
    total = args["samples"] + WARMUP
    for sample in range(total):
        if sample % 8 == 0:
            out.progress(sample, total, "steps")
        for index, (_, _, step, rows) in enumerate(plans):
            elapsed = _timed(step, bench.device)
            caches.rollback(rows)
            if sample >= WARMUP:
                seconds[index].append(elapsed)
    for (name, rows, _, _), times in zip(plans, seconds, strict=True):
        per = rows if name == "draft" else 1  # one call drafts a whole round: a line holds the time of one step
        out.line(
            StepLine.model_validate(
                {
                    "case": out.case,
                    "step": name,
                    "rows": 1 if name == "draft" else rows,
                    "context_tokens": len(context),
                    "seconds": tuple(value / per for value in times),
                }
            )
        )


def _timed(step: Callable[[], None], device: str) -> float:
    """Seconds of one call, the device's work included."""
    began = time.perf_counter()
    step()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - began
