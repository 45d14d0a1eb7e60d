"""Prompt stage: greedy text from every candidate in several numeric variants, the figures of each kept.

Writes prompt_report.json (sorted, best first per kind) so that a person picks from measured candidates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tools.nano.chat import render
from tools.nano.evaluate import Pair, free_running, in_dtype
from tools.nano.prompts import Candidate, candidates, long_candidates

COUNT = 256
KEEP = 24
LONG_TOKENS = range(880, 1010)
COMMITTED = {"code": "raw", "docs": "chat", "list": "raw", "long": "raw"}
ROOT = Path(__file__).resolve().parent.parent.parent


def prompt_ids(tokenizer: Tokenizer, candidate: Candidate) -> list[int]:
    """Token ids as the engine would build them: `<bos>` once, chat text as a user turn before the model's."""
    text = "<bos>" + candidate.text
    if candidate.form == "chat":
        text = render([("user", candidate.text)]) + "<|turn>model\n"
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def committed_prompts(pair: Pair, tokenizer: Tokenizer, tiny: bool) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The repository's own prompts: (numeric variants, figures of each prompt by file stem)."""
    found = {
        name: Candidate(name, form, (ROOT / "specs" / "prompts" / f"{name}.txt").read_text(encoding="utf-8"))
        for name, form in COMMITTED.items()
        if not (tiny and name == "long")
    }
    ids = [prompt_ids(tokenizer, candidate) for candidate in found.values()]
    variants = {"bf16": pair, "fp32": in_dtype(pair, torch.float32)}
    count = 16 if tiny else COUNT
    measured = {name: free_running(variant, ids, count) for name, variant in variants.items()}
    figures: dict[str, dict[str, Any]] = {}
    for index, (name, candidate) in enumerate(found.items()):
        first = measured["bf16"][index]
        figures[name] = {
            "form": candidate.form,
            "prompt_tokens": len(ids[index]),
            "distinct_tokens": first["distinct_tokens"],
            "least_distinct": min(results[index]["distinct_tokens"] for results in measured.values()),
            "acceptance_length": first["acceptance_length"],
            "acceptance_rate": first["acceptance_rate"],
        }
    return list(variants), figures


def choose_prompts(
    pair: Pair, tokenizer: Tokenizer, work: Path, limit: int, tiny: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure candidates; returns variants, how many were tried, and the spread of distinct tokens per kind."""
    count = 16 if tiny else COUNT
    found = candidates()
    if limit < len(found):
        found = found[:: -(-len(found) // limit)]
    if not tiny:
        sources = sorted([*(ROOT / "tools").rglob("*.py"), *(ROOT / "engine").glob("*.py")])
        longer = long_candidates(sources, (2700, 3000, 3300))
        longer = [c for c in longer if len(prompt_ids(tokenizer, c)) in LONG_TOKENS]
        found += longer[: max(limit // 10, 200)]
    prompts = [prompt_ids(tokenizer, candidate) for candidate in found]
    variants = {"bf16": pair} if tiny else {"bf16": pair, "fp32": in_dtype(pair, torch.float32)}
    measured = {name: free_running(variant, prompts, count) for name, variant in variants.items()}
    rows: list[dict[str, Any]] = []
    for index, candidate in enumerate(found):
        least = min(results[index]["distinct_tokens"] for results in measured.values())
        first = measured["bf16"][index]
        rows.append(
            {
                "kind": candidate.kind,
                "form": candidate.form,
                "text": candidate.text,
                "prompt_tokens": len(prompts[index]),
                "distinct_tokens": first["distinct_tokens"],
                "least_distinct": least,
                "acceptance_length": {name: results[index]["acceptance_length"] for name, results in measured.items()},
                "acceptance_rate": first["acceptance_rate"],
                "continuation": tokenizer.decode(first["tokens"], skip_special_tokens=False),
            }
        )
    spread: dict[str, Any] = {}
    report: list[dict[str, Any]] = []
    for kind in sorted({row["kind"] for row in rows}):
        own = sorted((row for row in rows if row["kind"] == kind), key=lambda row: -row["least_distinct"])
        values = torch.tensor([float(row["distinct_tokens"]) for row in own])
        lengths = torch.tensor([row["acceptance_length"]["bf16"] for row in own])
        spread[kind] = {
            "candidates": len(own),
            "distinct_quantiles": [int(v) for v in values.quantile(torch.tensor([0.1, 0.5, 0.9, 0.99]))],
            "at_least_80": int((values >= 80).sum()),
            "acceptance_mean": round(float(lengths.mean()), 3),
            "acceptance_of_80": round(float(lengths[values >= 80].mean()), 3) if (values >= 80).any() else None,
        }
        report += own[:KEEP]
        say(f"{kind}: {spread[kind]}")
    (work / "prompt_report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return {"variants": list(measured), "candidates": len(found), "spread": spread}
