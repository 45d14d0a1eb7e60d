"""One timed generation. The parent orders the arms, so that they interleave, also across children."""

from __future__ import annotations

from typing import Any

from engine.stats import distinct_tokens
from harness.worker.bench import DEFAULT_STAGE, Bench, Output, rounds_of, send_decision, sha256_ids
from harness.worker.identity import certificate_line, path_line


def run(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Args: mode (decide, classic or mtp), block_size, prompt, max_tokens, ignore_stop; to decide: arm, prompts.

    `decide` probes and sends the decision, the arm's kernels and, where the probe passed, a certificate. `mtp` refuses
    a block size that did not engage.
    """
    if args["mode"] == "decide":
        decision, result = bench.decide(DEFAULT_STAGE, args["block_size"])
        send_decision(out, decision, result)
        texts = [bench.prompt(data) for data in args.get("prompts", ())]
        cuts = [(len(text.tokens), text.history_boundary) for text in texts]
        out.line(path_line(bench, out.case, DEFAULT_STAGE, args["block_size"], cuts, args.get("arm", "")))
        found = certificate_line(bench, out.case, DEFAULT_STAGE, decision, result)
        if found is not None:
            out.line(found)
        return {"engaged": decision.engaged, "reason": decision.reason}
    prompt = bench.prompt(args["prompt"])
    request = bench.request(prompt, args["max_tokens"], args["ignore_stop"])
    if args["mode"] == "classic":
        generation = bench.classic(request)
    else:
        decision, _ = bench.decide(DEFAULT_STAGE, args["block_size"])
        if not decision.engaged:
            return {"engaged": False, "reason": decision.reason}
        generation = bench.mtp(request, args["block_size"])
    accepted, drafted = rounds_of(generation)
    rounds = generation.rounds
    return {
        "engaged": args["mode"] == "mtp",
        "prompt_tokens": len(prompt.tokens),
        "tokens": len(generation.tokens),
        "sha256": sha256_ids(generation.tokens),
        "distinct_tokens": distinct_tokens(generation.tokens),
        "ttft_s": generation.timing.ttft_s,
        "decode_s": generation.timing.decode_s,
        "accepted_per_round": accepted,
        "drafted_per_round": drafted,
        "verify_s": rounds.verify_s if rounds is not None else 0.0,
        "draft_s": rounds.draft_s if rounds is not None else 0.0,
    }
