"""MTP against classic decode: ids and text, for each prompt and block size."""

from __future__ import annotations

from typing import Any

from engine.margin import margin_at
from engine.requests import GenerationRequest
from engine.stats import Generation, distinct_tokens
from harness.record.lines import ComparisonLine
from harness.worker.bench import Bench, Output, PromptInput, rounds_of, send_decision, sha256_ids


def run(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Args: stage, block_sizes, prompts, max_tokens, ignore_stop.

    Each block size is probed first: a width that does not engage generates nothing, so its decision stands alone.
    """
    stage: str = args["stage"]
    engaged = []
    for block_size in args["block_sizes"]:
        decision, result = bench.decide(stage, block_size)
        send_decision(out, decision, result)
        if decision.engaged:
            engaged.append(block_size)
    total = len(args["prompts"]) * len(engaged)
    for index, data in enumerate(args["prompts"] if engaged else ()):
        prompt = bench.prompt(data)
        request = bench.request(prompt, args["max_tokens"], args["ignore_stop"])
        classic = bench.classic(request, stage)
        for offset, block_size in enumerate(engaged):
            out.progress(index * len(engaged) + offset, total, f"{prompt.name}, block size {block_size}")
            line = compare(bench, out.case, prompt, block_size, classic, bench.mtp(request, block_size, stage))
            out.line(line.model_copy(update={"margin": margin(bench, request, classic, line, stage)}))
    return {}


def margin(
    bench: Bench, request: GenerationRequest, classic: Generation, line: ComparisonLine, stage: str
) -> float | None:
    """How sure classic decode was of the first token that differs; None when none does, or one output merely ends."""
    index = line.first_difference
    if index is None or index >= len(classic.tokens):
        return None
    return margin_at(bench.at(stage).target, request, classic.tokens, index, bench.prefill_chunk)


def compare(
    bench: Bench, case: str, prompt: PromptInput, block_size: int, classic: Generation, mtp: Generation
) -> ComparisonLine:
    """One comparison as a raw line; a shorter output differs at its end."""
    ours, theirs = classic.tokens, mtp.tokens
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if first is None and len(ours) != len(theirs):
        first = min(len(ours), len(theirs))
    accepted, drafted = rounds_of(mtp)
    return ComparisonLine(
        case=case,
        prompt=prompt.name,
        form=prompt.form,
        prompt_tokens=len(prompt.tokens),
        block_size=block_size,
        tokens=len(theirs),
        identical=ours == theirs and classic.finish_reason == mtp.finish_reason,
        text_identical=bench.text(ours) == bench.text(theirs),
        first_difference=first,
        classic_sha256=sha256_ids(ours),
        mtp_sha256=sha256_ids(theirs),
        finish_reason=mtp.finish_reason,
        distinct_tokens=distinct_tokens(theirs),
        accepted_per_round=accepted,
        drafted_per_round=drafted,
        decode_s=mtp.timing.decode_s,
        classic_decode_s=classic.timing.decode_s,
    )
