"""Log lines of vLLM, SGLang and llama.cpp that state how drafting went, one reader each. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from harness.counters import Counters, Stated

NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"


def percent(text: str) -> Stated | None:
    """A figure printed in per cent, as a share; None for what is none."""
    digits = text.strip().removesuffix("%")
    return Stated.parse(digits, 0.01) if re.fullmatch(NUMBER, digits) else None


def _needed(pattern: str, line: str, what: str) -> re.Match[str]:
    match = re.search(pattern, line)
    if match is None:
        raise ValueError(f"no {what} where it should be")
    return match


def _optional(pattern: str, line: str) -> re.Match[str] | None:
    return re.search(pattern, line)


def _vllm_log(place: str, line: str) -> Counters | None:
    """`SpecDecoding metrics: Mean acceptance length: 3.42, ..., Per-position acceptance rate: 0.9, 0.8, ...`."""
    rates = _optional(rf"Per-position acceptance rate: ((?:{NUMBER}(?:, )?)+)", line)
    length = _optional(rf"Mean acceptance length: ({NUMBER})", line)
    rate = _needed(rf"Draft acceptance rate: ({NUMBER}|nan)%", line, "draft acceptance rate")
    if rate[1] == "nan":  # an interval in which nothing was drafted
        return None
    return Counters(
        f"vLLM log, {place}",
        drafted=int(_needed(r"Drafted: ([0-9]{1,15}) tokens", line, "number of drafted tokens")[1]),
        accepted=int(_needed(r"Accepted: ([0-9]{1,15}) tokens", line, "number of accepted tokens")[1]),
        acceptance_rate=percent(rate[1]),
        acceptance_length=Stated.parse(length[1]) if length else None,
        rates_at=tuple(map(Stated.parse, re.findall(NUMBER, rates[1]))) if rates else (),
        max_drafts=len(re.findall(NUMBER, rates[1])) if rates else None,
    )


def _sglang_log(place: str, line: str) -> Counters:
    """`Decode batch, ..., accept len: 2.31, accept rate: 0.58, ...`."""
    rate = _optional(rf"accept rate: ({NUMBER})", line)
    return Counters(
        f"SGLang log, {place}",
        acceptance_length=Stated.parse(_needed(rf"accept len: ({NUMBER})", line, "number after accept len")[1]),
        acceptance_rate=Stated.parse(rate[1]) if rate else None,
    )


def _llama_request(place: str, line: str) -> Counters:
    """`draft acceptance rate = 0.57576 (  171 accepted /   297 generated)`, newer ones with `, mean len = 2.52`."""
    match = _needed(
        rf"draft acceptance(?: rate)?\s+=\s+({NUMBER})\s+"
        r"\(\s*([0-9]{1,15}) accepted /\s*([0-9]{1,15}) generated\)",
        line,
        "`RATE (N accepted / N generated)`",
    )
    length = _optional(rf"mean len\s+=\s+({NUMBER})", line)
    return Counters(
        f"llama.cpp request, {place}",
        drafted=int(match[3]),
        accepted=int(match[2]),
        acceptance_rate=Stated.parse(match[1]),
        acceptance_length=Stated.parse(length[1]) if length else None,
    )


def _llama_statistics(place: str, line: str) -> Counters:
    """`statistics draft-mtp: ..., #gen drafts = 203, #acc drafts = 172, #gen tokens = 405, #acc tokens = 308, ...`."""

    def count(name: str) -> int:
        return int(_needed(rf"#{name}\s+=\s+([0-9]{{1,15}})", line, f"number after #{name}")[1])

    length = _optional(rf"#mean acc len\s+=\s+({NUMBER})", line)
    rates = _optional(rf"#acc rate/pos\s+=\s+\(((?:{NUMBER}(?:, )?)+)\)", line)
    return Counters(
        f"llama.cpp statistics, {place}",
        rounds=count("gen drafts"),
        drafted=count("gen tokens"),
        accepted=count("acc tokens"),
        acceptance_length=Stated.parse(length[1]) if length else None,
        rates_at=tuple(map(Stated.parse, re.findall(NUMBER, rates[1]))) if rates else (),
        rounds_that_accepted=count("acc drafts"),
    )


LOG_LINES: dict[str, Callable[[str, str], Counters | None]] = {
    "SpecDecoding metrics:": _vllm_log,
    "accept len:": _sglang_log,
    "draft acceptance": _llama_request,
    "#gen drafts": _llama_statistics,
}
"""What a line must hold -> its reader; the first that fits reads it."""
