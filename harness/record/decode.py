"""Figures of a `peer_decode` case from its raw lines. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from harness import stats
from harness.decode_figures import decode_times
from harness.kernel_figures import OURS
from harness.record.lines import AnyLine, BlockLine, PeerLine
from harness.record.model import DecodeFigures, EngineFigures


def decode_figures(events: Sequence[AnyLine], withhold: bool) -> tuple[DecodeFigures, ...]:
    """Every engine after every context, ours first; without times where `withhold`, or where our own block differs."""
    blocks = {(line.arm, line.context_tokens): line for line in events if isinstance(line, BlockLine)}
    times = decode_times(events)
    hidden = withhold or any(line.differing_bytes for (arm, _), line in blocks.items() if arm == OURS)
    failed = {line.peer for line in events if isinstance(line, PeerLine) and line.reason is not None}
    keys = dict.fromkeys([*blocks, *((line.arm, line.context_tokens) for line in times.lines)])
    found = []
    for arm, context in keys:
        block, line = blocks.get((arm, context)), times.line(arm, context)
        if arm in failed:
            continue
        seconds = () if hidden or line is None else line.seconds
        block_ms = stats.median_ms(block.seconds) if seconds and block is not None and block.seconds else None
        token_ms = times.ms(arm, context) if seconds else None
        found.append(
            DecodeFigures(
                arm=arm,
                context_tokens=context,
                ms_per_token=token_ms,
                min_ms=1000 * min(seconds) if seconds else None,
                max_ms=1000 * max(seconds) if seconds else None,
                n=len(seconds),
                speedup=times.speedup(arm, context) if seconds and arm != OURS else None,
                same_tokens=times.same_tokens(arm, context) if arm != OURS else None,
                tokens=len(line.tokens) if line is not None else 0,
                rows=block.rows if block is not None else 0,
                rows_equal=block.rows_equal if block is not None else None,
                differing_bytes=block.differing_bytes if block is not None else None,
                total_bytes=block.total_bytes if block is not None else None,
                argmax_equal=block.argmax_equal if block is not None else None,
                repeatable=block.repeatable if block is not None else None,
                block_ms=block_ms,
                block_over_token=block_ms / token_ms if block_ms and token_ms else None,
            )
        )
    return tuple(sorted(found, key=lambda figures: (figures.context_tokens, figures.arm != OURS)))


def engine_figures(events: Sequence[AnyLine]) -> tuple[EngineFigures, ...]:
    """The peers, each with its version or with why it was not measured."""
    return tuple(
        EngineFigures(peer=line.peer, reason=line.reason, version=line.version, note=line.note)
        for line in events
        if isinstance(line, PeerLine)
    )
