"""Where it ran, how to run it again, and what it does not say."""

from __future__ import annotations

from typing import Any

from harness.record.model import Record
from harness.record.sections.common import data_link, skipped_cases
from harness.record.table import cell, code, count, seconds, table


def host(record: Record, stem: str) -> str:
    """Short table; the full copy is env.json. Then the children and the flags they really read."""
    rows = [[label, cell(value)] for label, value in record.host.items()]
    rows.append(["Started (UTC)", cell(record.started_utc or "not recorded")])
    rows.append(["Ended (UTC)", cell(record.ended_utc or "not recorded: the run was killed")])
    if record.resumed:
        rows.append(["Resumed", f"{record.resumed} times" if record.resumed > 1 else "once"])
    models = _models(record)
    rows += [[label, cell(text)] for label, text in models]
    parts = ["## Host and provenance", table(["What", "Value"], rows)]
    if record.children:
        parts.append(_children(record))
    parts.append(f"Everything recorded: {data_link(stem, 'env.json')}.")
    return "\n\n".join(parts)


def _models(record: Record) -> list[tuple[str, str]]:
    if not record.children:
        return []
    first = record.children[0]
    return [
        (label, _model_words(model)) for label, model in (("Target", first.target), ("Drafter", first.drafter)) if model
    ]


def _model_words(model: dict[str, Any]) -> str:
    """Name, format, size in memory and the start of its hashes; whatever of them the child reported."""
    fingerprint = model.get("fingerprint")
    hashes: dict[str, Any] = fingerprint if isinstance(fingerprint, dict) else {"sha256": fingerprint}
    parts = [str(model[key]) for key in ("name", "quantization") if model.get(key)]
    parts += [f"{model['bytes'] / 1e6:.1f} MB loaded"] if isinstance(model.get("bytes"), int) else []
    parts += [str(model[key]).rstrip(".") for key in ("origin", "seeded") if model.get(key)]
    words = {"sha256": "SHA-256", "index_sha256": "index SHA-256", "config_sha256": "config SHA-256"}
    for key, word in {**words, "text_sha256": "tokenizer and template SHA-256"}.items():
        parts += [f"{word} {hashes[key][:12]}"] if isinstance(hashes.get(key), str) else []
    return ", ".join(parts) or "not recorded"


def _children(record: Record) -> str:
    rows = []
    phased = any(child.load_phases for child in record.children)
    for child in record.children:
        asked = [f"{name}={value}" for name, value in child.env_requested.items() if value is not None]
        peak = child.peak_memory_bytes
        rows.append(
            [
                cell(child.child),
                ", ".join(map(code, asked)) or "none",
                _differing_flags(child.flags_effective, record),
                seconds(child.ready_s),
                *([_phases(child.load_phases)] if phased else []),
                "not recorded" if peak is None else count(round(peak / 2**20)),
            ]
        )
    columns = ["Child", "Flags asked for", "Flags read that differ between children", ">Ready s"]
    return table([*columns, *(["Of it"] if phased else []), ">Peak MiB"], rows)


def _phases(phases: dict[str, float]) -> str:
    """Where a child's start went; the rest of it is the interpreter and its imports."""
    return ", ".join(f"{cell(phase)} {took:.2f}" for phase, took in phases.items() if took >= 0.005) or "not recorded"


def _differing_flags(flags: dict[str, str], record: Record) -> str:
    seen = [child.flags_effective for child in record.children]
    differing = [name for name in flags if len({other.get(name) for other in seen}) > 1]
    return ", ".join(code(f"{name}={flags[name]}") for name in differing) or "none"


def reproduce(record: Record, stem: str) -> str:
    """The commands that make this record again, and the one that checks it."""
    if not record.command:
        return ""
    commands = [record.command, f"harness report --check docs/benchmark_results/{stem}.md"]
    block = "\n".join(" ".join(command.split()) for command in commands)
    return (
        f"## Reproduce\n\n```bash\n{block}\n```\n\n"
        "The first line runs it again on this machine (a new record, this one stays); "
        "the second recomputes every figure of this page from its raw lines."
    )


def not_covered(record: Record, stem: str) -> str:
    """What a reader might think was covered, and was not."""
    lines = [f"- {cell(case.name)}: skipped, {cell(case.reason)}" for case in skipped_cases(record)]
    lines += [f"- {cell(case.name)}: unfinished, {cell(case.reason)}" for case in record.cases if not case.finished]
    lines += [f"- {cell(name.rpartition('::')[2])}: not run" for name in record.not_run]
    if origin := next((str(child.target["origin"]) for child in record.children if child.target.get("origin")), ""):
        lines.append(f"- Released weights: {cell(origin)} Shapes and cost are the real model's, text is nano's.")
    if seeded := next((str(child.target["seeded"]) for child in record.children if child.target.get("seeded")), ""):
        lines.append(f"- Released weights, and with them acceptance and speed-up: these are {cell(seeded)}.")
    arms = [arm for case in record.cases for arm in case.arms]
    kernels = any(case.kernel is not None for case in record.cases)
    if kernels:
        lines.append(
            "- Whole steps: each op ran alone, its calls one after another; text and decode rate are not here."
        )
        lines += _missing_peers(record)
    elif not arms:
        lines.append("- Speed: no arm was timed.")
    elif all(arm.n < 6 for arm in arms):
        lines.append("- Small differences: fewer than six pairs resolve only what is far outside the noise.")
    absent = [engine for case in record.cases for engine in case.engines if engine.reason is not None]
    lines += [f"- {cell(engine.peer)}: {cell(engine.reason or '')}." for engine in absent]
    prompts = record.prompts
    if prompts:
        lines.append(f"- Other texts: the prompts are {cell(', '.join(prompts))}; acceptance depends on the text.")
    lines.append(f"- Other machines and days: this is one run on one machine ({cell(record.device)}).")
    if not kernels:
        lines.append("- Sampling (temperature above 0) and batches above 1: refused, not measured.")
    return "## Not covered here\n\n" + "\n".join(lines)


def _missing_peers(record: Record) -> list[str]:
    """Peers that no shape was measured against, each with its first reason."""
    found = [peer for case in record.cases if case.kernel is not None for peer in case.kernel.peers]
    reasons = {peer.peer: peer.reason for peer in reversed(found) if peer.reason}
    measured = {peer.peer for peer in found if peer.ratio}
    return [f"- Peer {cell(name)}: {cell(reason)}." for name, reason in reasons.items() if name not in measured]
