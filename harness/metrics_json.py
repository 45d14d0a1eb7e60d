"""Responses of SGLang and llama.cpp, and raw lines of ours, as JSON objects that hold drafting counts. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from harness.counters import Counters, Stated, of_rounds


def _count(item: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = item.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
                raise ValueError(f"{name} is {json.dumps(value)[:40]}, not a whole number")
            return int(value)
    return None


def _share(item: Mapping[str, Any], name: str) -> Stated | None:
    value = item.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{name} is {json.dumps(value)[:40]}, not a number")
    return Stated(float(value))


def _sglang_response(place: str, item: Mapping[str, Any]) -> Counters | None:
    """A response's meta_info: spec_verify_ct, accepted and proposed drafts, a histogram of accepted drafts a round."""
    rounds = _count(item, "spec_verify_ct")
    if not rounds:
        return None
    accepted = _count(item, "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    drafted = _count(item, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
    histogram = item.get("spec_correct_drafts_histogram", item.get("spec_accept_histogram"))
    at: tuple[int, ...] | None = None
    if histogram is not None:
        if not isinstance(histogram, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in histogram):
            raise ValueError("the histogram of accepted drafts is not a list of whole numbers")
        at = tuple(sum(histogram[place:]) for place in range(1, len(histogram)))
    most = drafted // rounds if drafted else None
    return Counters(
        f"SGLang response, {place}",
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        accepted_at=at,
        histogram_rounds=sum(histogram) if histogram is not None else None,
        max_drafts=most,
        whole_blocks=most is not None,
        emitted=_count(item, "completion_tokens"),
        cut_limit=most,
        acceptance_rate=_share(item, "spec_accept_rate"),
        emitted_per_round=_share(item, "spec_accept_length"),
    )


def _llama_timings(place: str, item: Mapping[str, Any]) -> Counters:
    """A response's timings: draft_n, draft_n_accepted, predicted_n."""
    return Counters(
        f"llama.cpp timings, {place}",
        drafted=_count(item, "draft_n"),
        accepted=_count(item, "draft_n_accepted"),
        emitted=_count(item, "predicted_n"),
    )


def _our_line(place: str, item: Mapping[str, Any]) -> Counters | None:
    """A raw line of ours: a generation with its rounds."""
    accepted, drafted = item.get("accepted_per_round"), item.get("drafted_per_round")
    lists = [part for part in (accepted, drafted) if isinstance(part, list) and all(type(n) is int for n in part)]
    if len(lists) != 2 or len(lists[0]) != len(lists[1]):
        raise ValueError("accepted_per_round and drafted_per_round are not two lists of counts of one length")
    if not lists[0]:
        return None
    return of_rounds(
        f"{item.get('prompt', '')} {item.get('arm', '')}".strip() + f", {place}",
        lists[0],
        lists[1],
        tokens=_count(item, "tokens"),
        block_size=_count(item, "block_size"),
    )


JSON_OBJECTS: dict[str, Callable[[str, Mapping[str, Any]], Counters | None]] = {
    "spec_verify_ct": _sglang_response,
    "draft_n": _llama_timings,
    "drafted_per_round": _our_line,
}
"""What an object must hold -> its reader."""
