"""`peer_decode`: the same checkpoint in other engines, in the same run: time per token, and a block against its chain.

Ours comes first and must be exact: where a row of our own block differs from our chain, no speed is stated. A peer
that is not installed, or fails, is a reason on the page; what its block does to its chain is its own affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.checks.base import Judgement, of_type, prompt_inputs
from harness.decode_figures import MIN_SAMPLES, DecodeTimes, decode_times
from harness.errors import RunError
from harness.kernel_figures import OURS
from harness.record.lines import AnyLine, BlockLine, PeerLine
from harness.spec.model import PeerDecode
from harness.spec.resolve import models_root, pair_folders

if TYPE_CHECKING:
    from harness.context import RunContext
    from harness.spec.plan import Case


def measure(case: Case, context: RunContext) -> None:
    """Ours in the pair's child, then each peer in a process of its own, one after another."""
    check = case.check
    assert isinstance(check, PeerDecode)
    prompt: Mapping[str, str] = prompt_inputs(check.prompts, case.folder)[0]
    common: dict[str, Any] = {"contexts": check.contexts, "tokens": check.tokens, "rows": case.block_size}
    with context.measuring(case):
        ours = context.job(case, "decode_ours", prompt=prompt, **common)
        if not ours["exact"] or case.pair is None:
            return
        target = pair_folders(case.pair, case.folder, models_root())[0]
        for peer in check.peers:
            try:
                context.aside(
                    case, f"peer-{peer}", "decode_peer", peer=peer, target=str(target), ids=ours["ids"], **common
                )
            except RunError as error:  # the process died: ours and the other peers stand
                context.emit(PeerLine(case=case.id, peer=peer, reason=str(error)))


def judge(case: Case, lines: Sequence[AnyLine], others: Sequence[AnyLine]) -> Judgement:
    """Our bytes, then that everything the spec names is there, then the bars."""
    check = case.check
    assert isinstance(check, PeerDecode)
    blocks = [line for line in of_type(lines, BlockLine) if line.arm == OURS]
    for line in blocks:
        if line.differing_bytes or line.rows_equal != line.rows:
            where = f"{line.rows - line.rows_equal} of {line.rows} rows after {line.context_tokens} tokens"
            return Judgement("fail", f"our own block differs from our chain in {where}; no speed is stated")
    if {line.context_tokens for line in blocks} != set(check.contexts):
        return Judgement("error", "our own block was not compared at every context")
    times = decode_times(lines)
    said = {line.peer: line for line in of_type(lines, PeerLine)}
    problem = _incomplete(check, times, said)
    if problem:
        return Judgement("error", problem)
    present = [peer for peer in check.peers if said[peer].reason is None]
    absent = "; ".join(f"{peer}: {said[peer].reason}" for peer in check.peers if peer not in present)
    missed, undecided = _bars(check, times, said)
    if missed:
        return Judgement("fail", "; ".join(missed))
    if not present:
        return Judgement("skipped", f"no peer ran: {absent}")
    if undecided:
        return Judgement("unresolved", "; ".join(undecided))
    parts = [*(_summary(check, times, peer, lines) for peer in present), *([absent] if absent else [])]
    return Judgement("pass", "; ".join(parts))


def _incomplete(check: PeerDecode, times: DecodeTimes, said: Mapping[str, PeerLine]) -> str | None:
    """The first arm that the spec names and the lines lack, or None."""
    for peer in check.peers:
        if peer not in said:
            return f"peer {peer} was neither measured nor skipped"
    for arm in (OURS, *(peer for peer in check.peers if said[peer].reason is None)):
        for context in check.contexts:
            if times.samples(arm, context) < min(MIN_SAMPLES, check.tokens):
                return f"{arm} was not timed after {context} tokens"
    return None


def _bars(check: PeerDecode, times: DecodeTimes, said: Mapping[str, PeerLine]) -> tuple[list[str], list[str]]:
    """Bars missed, and bars that nothing was measured for, in words."""
    missed: list[str] = []
    undecided: list[str] = []
    for peer, least in check.min_speedup.model_dump(exclude_none=True).items():
        if reason := said[peer].reason:
            undecided.append(f"{peer} was not measured (bar: at least {least:g} times our time): {reason}")
            continue
        for context in check.contexts:
            ratio = times.speedup(peer, context)
            if ratio is None or ratio < least:
                found = "not measured" if ratio is None else f"{ratio:.2f} times ours"
                missed.append(f"{peer}'s time after {context} tokens is {found}, bar at least {least:g}")
    return missed, undecided


def _summary(check: PeerDecode, times: DecodeTimes, peer: str, lines: Sequence[AnyLine]) -> str:
    """A peer in words: its times over ours, and its block."""
    took = " and ".join(
        f"{times.speedup(peer, context):.2f}x ours ({times.ms(peer, context):.2f} ms) after {context} tokens"
        for context in check.contexts
    )
    rows = [line for line in of_type(lines, BlockLine) if line.arm == peer]
    equal, of = sum(line.rows_equal for line in rows), sum(line.rows for line in rows)
    return f"{peer} takes {took}, {equal} of {of} rows of its block equal its chain"
