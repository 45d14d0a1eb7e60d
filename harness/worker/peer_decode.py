"""Classic decode of this engine and of others on one checkpoint and one prompt, and a block against its own chain.

A peer runs in a child that loads no pair of ours: its memory, its libraries and its faults are its own.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.compare import differing_bytes
from engine.prefill import run_prefill
from harness.kernel_figures import OURS
from harness.record.lines import BlockLine, DecodeLine, PeerLine
from harness.worker.bench import DEFAULT_STAGE, Bench, Output, PromptInput
from harness.worker.steps import continued

WARM_TOKENS = 4
"""First tokens of a generation, which are not timed: a pipeline fills, a graph is captured."""
BLOCK_RUNS = 6
"""Times that our block is run; the first warms up."""
REASON_CHARACTERS = 300
Mark = Callable[[int], None]
Generate = Callable[[Sequence[int], int, Mark], None]
"""(prompt, count, mark): decode `count` tokens greedily, calling `mark` with each when the host has it."""


def run_ours(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Args: prompt, contexts, tokens, rows. Sends a block and times per context; returns ids for the peers."""
    contexts, rows = sorted(args["contexts"]), int(args["rows"])
    ids = continued(bench, bench.prompt(args["prompt"]), contexts[-1] + rows)
    exact = True
    for number, context in enumerate(contexts):
        out.progress(number, len(contexts), f"ours at {context} tokens")
        line = _our_block(bench, ids[:context], ids[context : context + rows], out.case)
        exact = exact and line.rows_equal == line.rows
        out.line(line)
        out.line(_decode_line(out.case, OURS, lambda *given: _ours(bench, *given), ids[:context], args["tokens"]))
    return {"ids": ids, "exact": exact}


def run_peer(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Args: peer, target, ids, contexts, tokens, rows. Sends what the peer did, and last whether it takes part."""
    name, version, note, reason = args["peer"], "", "", None
    try:
        module: Any = importlib.import_module(f"tools.peers.decode_{name}")
    except ImportError as error:
        out.line(PeerLine(case=out.case, peer=name, reason=f"tools/peers is not here: {error}"))
        return {}
    try:
        reason = module.available(bench.device)
        if reason is None:
            version = module.version()
            decoder = module.load(Path(args["target"]), bench.device)
            note = decoder.note
            _measure_peer(decoder, args, out)
    except Exception as error:  # whatever goes wrong in a peer is a reason, not a failure of ours
        words = " ".join(str(error).split())[:REASON_CHARACTERS]
        reason = f"{type(error).__name__}: {words}"
    out.line(PeerLine(case=out.case, peer=name, reason=reason, version=version, note=note))
    return {}


def _measure_peer(decoder: Any, args: dict[str, Any], out: Output) -> None:
    """The peer at every context: first the block, which also warms it up, then times."""
    ids, rows, name = args["ids"], int(args["rows"]), args["peer"]

    def generate(prompt: Sequence[int], count: int, mark: Mark) -> None:
        for token in decoder.generate(prompt, count):
            mark(token)

    for number, context in enumerate(sorted(args["contexts"])):
        out.progress(number, len(args["contexts"]), f"{name} at {context} tokens")
        found = decoder.block_rows(ids[:context], ids[context : context + rows])
        different = found.block != found.chain
        out.line(
            BlockLine(
                case=out.case,
                arm=name,
                context_tokens=context,
                rows=rows,
                rows_equal=int((~different.any(axis=1)).sum()),
                differing_bytes=int(different.sum()),
                total_bytes=int(different.size),
                argmax_equal=sum(a == b for a, b in zip(found.block_ids, found.chain_ids, strict=True)),
                repeatable=bool((found.chain == found.chain_again).all()),
                seconds=_rounded(found.block_s),
            )
        )
        out.line(_decode_line(out.case, name, generate, ids[:context], args["tokens"]))


def _decode_line(case: str, arm: str, generate: Generate, prompt: Sequence[int], count: int) -> DecodeLine:
    """Seconds from one token to the next, the first few left out."""
    tokens: list[int] = []
    times: list[float] = []

    def mark(token: int) -> None:
        times.append(time.perf_counter())
        tokens.append(int(token))

    generate(prompt, count + WARM_TOKENS + 1, mark)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return DecodeLine(
        case=case,
        arm=arm,
        context_tokens=len(prompt),
        tokens=tuple(tokens),
        seconds=_rounded(gaps[WARM_TOKENS:]),
    )


def _ours(bench: Bench, prompt: Sequence[int], count: int, mark: Mark) -> None:
    request = bench.request(PromptInput("", "raw", tuple(prompt), None), count, True)
    bench.classic(request, on_token=mark)


def _our_block(bench: Bench, context: Sequence[int], block: Sequence[int], case: str) -> BlockLine:
    """The block as one verify step against as many classic steps, logits as bytes."""
    target = bench.at(DEFAULT_STAGE).target
    caches = target.new_caches()
    run_prefill(target, context, None, bench.prefill_chunk, caches)
    chains, ids = [], []
    for _ in range(2):
        held = caches.clone()
        steps = [target.step([token], held, "classic") for token in block]
        chains.append(torch.cat([step.logits.clone() for step in steps]))
        ids = [step.argmax[0] for step in steps]
    seconds = []
    for run in range(BLOCK_RUNS):
        began = time.perf_counter()
        found = target.step(list(block), caches, "verify")
        seconds.append(time.perf_counter() - began)
        if run + 1 < BLOCK_RUNS:
            caches.rollback(len(block))
    differing = [differing_bytes(one, other) for one, other in zip(found.logits, chains[0], strict=True)]
    return BlockLine(
        case=case,
        arm=OURS,
        context_tokens=len(context),
        rows=len(block),
        rows_equal=sum(count == 0 for count in differing),
        differing_bytes=sum(differing),
        total_bytes=chains[0].numel() * chains[0].element_size(),
        argmax_equal=sum(a == b for a, b in zip(found.argmax, ids, strict=True)),
        repeatable=differing_bytes(*chains) == 0,
        seconds=_rounded(seconds[1:]),
    )


def _rounded(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in seconds)
