"""`harness try`: one prompt, streamed, with what the gate decided and how fast it went."""

from __future__ import annotations

from typing import Any

from engine.text import TextStream
from harness import stats
from harness.worker.bench import DEFAULT_STAGE, Bench, Output, rounds_of


def run(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Args: prompt, block_size, max_tokens, ignore_stop, stage, classic (also time classic decode)."""
    stage = args.get("stage") or DEFAULT_STAGE
    block_size = args["block_size"]
    prompt = bench.prompt(args["prompt"])
    request = bench.request(prompt, args["max_tokens"], args["ignore_stop"])
    decision, _ = bench.decide(stage, block_size)
    stream = TextStream(bench.text)

    def show(token: int) -> None:
        if piece := stream.push(token):
            out.text(piece)

    if decision.engaged:
        generation = bench.mtp(request, block_size, stage, on_token=show)
    else:
        generation = bench.classic(request, stage, on_token=show)
    if tail := stream.finish():
        out.text(tail)
    accepted, drafted = rounds_of(generation)
    data: dict[str, Any] = {
        "engaged": decision.engaged,
        "inexact": decision.inexact,
        "log_line": decision.log_line,
        "prompt_tokens": len(prompt.tokens),
        "tokens": len(generation.tokens),
        "finish_reason": generation.finish_reason,
        "ttft_s": generation.timing.ttft_s,
        "decode_tok_s": generation.decode_tok_s,
        "distinct_tokens": generation.distinct_tokens,
        "acceptance_rate": stats.acceptance_rate(accepted, drafted) if accepted else None,
        "acceptance_length": stats.acceptance_length(accepted) if accepted else None,
    }
    if args["classic"]:
        classic = bench.classic(request, stage)
        data["classic_tok_s"] = classic.decode_tok_s
        data["identical"] = classic.tokens == generation.tokens
    return data
