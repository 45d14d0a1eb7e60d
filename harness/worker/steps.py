"""Times of single steps at one context: the inputs of the cost model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from engine.prefill import run_prefill
from harness.record.lines import StepLine
from harness.worker.bench import DEFAULT_STAGE, Bench, Output

WARMUP = 3


def run(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Args: prompt, context_tokens, block_sizes, samples. Sends a line per step and block size.

    The context is the prompt and classic's own continuation of it, so that the drafter sees real text. The four kinds
    of step take turns inside each sample, so that drift of the machine falls on all of them alike.
    """
    pair = bench.at(DEFAULT_STAGE)
    target, drafter = pair.target, pair.drafter
    prompt = bench.prompt(args["prompt"])
    missing = max(args["context_tokens"] - len(prompt.tokens), 0)
    text = [*prompt.tokens, *bench.classic(bench.request(prompt, missing, True)).tokens]
    context = text[: max(args["context_tokens"], 1)]
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

        # Token by token each step costs the same; a whole block at once costs about the same at any width.
        for width in sorted(set(args["block_sizes"])) if drafter.one_pass else (deepest + 1,):

            def draft(count: int = width - 1) -> None:
                drafter.draft(token, hidden, shared, count)

            plans.append(("draft", width, draft, 0))
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
        per = rows - 1 if name == "draft" else 1  # one call drafts a whole round: a line holds the time of one draft
        out.line(
            StepLine.model_validate(
                {
                    "case": out.case,
                    "step": name,
                    "rows": 1 if name == "draft" and not drafter.one_pass else rows,
                    "context_tokens": len(context),
                    "seconds": tuple(value / per for value in times),
                }
            )
        )
    return {}


def _timed(step: Callable[[], None], device: str) -> float:
    """Seconds of one call, the device's work included."""
    began = time.perf_counter()
    step()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - began
