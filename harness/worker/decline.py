"""A stage that must decline: what the gate says, and whether the served text is still classic's."""

from __future__ import annotations

from typing import Any

from harness.record.lines import CheckLine
from harness.worker.bench import DEFAULT_STAGE, Bench, Output, send_probe, sha256_ids


def run(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Args: stage, block_size, draws, gate, expect_reason, prompts, max_tokens, ignore_stop."""
    stage, block_size = args["stage"], args["block_size"]
    decision, result = bench.decide(stage, block_size, args["draws"], walk=False, afresh=True, gate=args["gate"])
    send_probe(out, decision, result)

    def check(name: str, passed: bool, expected: str, found: str) -> None:
        out.line(CheckLine(case=out.case, name=name, passed=passed, expected=expected, found=found))

    check("declines", not decision.engaged, "MTP declined", decision.log_line.split(":")[0])
    wanted: str = args["expect_reason"]
    check("reason", wanted in decision.reason, f"contains {wanted!r}", decision.reason)
    for index, data in enumerate(args["prompts"]):
        out.progress(index, len(args["prompts"]), data["name"])
        prompt = bench.prompt(data)
        request = bench.request(prompt, args["max_tokens"], args["ignore_stop"])
        served = bench.serve(request, decision, block_size, stage)
        classic = bench.classic(request, DEFAULT_STAGE)
        same = served.tokens == classic.tokens and served.finish_reason == classic.finish_reason
        check(
            f"{prompt.name}: output",
            same,
            f"{len(classic.tokens)} tokens, sha256 {sha256_ids(classic.tokens)[:12]}",
            f"{len(served.tokens)} tokens, sha256 {sha256_ids(served.tokens)[:12]}",
        )
        rounds = served.rounds.num_rounds if served.rounds is not None else 0
        check(f"{prompt.name}: rounds", rounds == 0, "0", str(rounds))
    return {}
