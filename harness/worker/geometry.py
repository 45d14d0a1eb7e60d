"""The loaded pair's shapes and predicates, as the engine sees them."""

from __future__ import annotations

import dataclasses
from typing import Any

from engine.config import mtp_requires_linear_singleton
from harness.worker.bench import DEFAULT_STAGE, Bench, Output

WRAP = 2  # tokens past the window, so that the sliding layer's ring has gone round
WITHOUT_WINDOW = 40


def run(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Config fields of target and drafter, predicates, and whether the drafter gets the right K/V or hidden states."""
    pair = bench.at(DEFAULT_STAGE)
    config = pair.target.config
    kinds = list(config.layer_types)
    facts: dict[str, Any] = {
        "target": _fields(config),
        "drafter": _fields(pair.drafter.config) if pair.drafter is not None else {},
        "full_layers": sum(kind == "full_attention" for kind in kinds),
        "linear_singleton_cpu": mtp_requires_linear_singleton(config, False),
        "linear_singleton_cuda": mtp_requires_linear_singleton(config, True),
    }
    if pair.drafter is not None:
        count = (config.sliding_window or WITHOUT_WINDOW) + WRAP
        tokens = [1 + index % (config.vocab_size - 1) for index in range(count)]
        facts["shared_kv_problem"] = pair.family.shared_problem(pair.target, tokens)
        facts["shared_claim"] = pair.family.shared_claim
    return facts


def _fields(config: Any) -> dict[str, Any]:
    """A config's fields as JSON data."""
    fields: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        fields[item.name] = list(value) if isinstance(value, tuple) else value
    return {name: value for name, value in fields.items() if isinstance(value, str | int | float | bool | list | None)}
