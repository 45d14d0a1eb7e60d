"""The exactness probe at one stage, for one or more block sizes."""

from __future__ import annotations

from typing import Any

from harness.worker.bench import Bench, Output, send_probe
from harness.worker.identity import certificate_line, path_line
from harness.worker.row_identity import differing_ops


def run(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Args: stage, block_sizes, draws, walk, ops. Sends a line per draw, then a decision, the kernels and,
    where it passed, a certificate per block size.

    With `ops` there is none: it returns which ops differ from their one-row calls on their own, at the first
    block size.
    """
    sizes = args["block_sizes"]
    for done, block_size in enumerate(sizes):
        out.progress(done, len(sizes), f"block size {block_size}")
        decision, result = bench.decide(args["stage"], block_size, args["draws"], args["walk"], afresh=True)
        send_probe(out, decision, result)
        out.line(path_line(bench, out.case, args["stage"], block_size, [(length, None) for length in args["draws"]]))
        found = None if args.get("ops") else certificate_line(bench, out.case, args["stage"], decision, result)
        if found is not None:
            out.line(found)
    if not args.get("ops"):
        return {}
    return {"differing_ops": differing_ops(bench.at(args["stage"]).target, sizes[0])}
