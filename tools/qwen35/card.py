"""The README of the small pair's checkpoint folder, from the facts that the trainer recorded."""

from __future__ import annotations

from typing import Any


def card(facts: dict[str, Any]) -> str:
    """Markdown: what it is, what it was trained on, and what it reached."""
    target, drafter, data = facts["target"], facts["drafter"], facts["data"]
    right = ", ".join(f"{share:.3f}" for share in drafter["right"])
    return f"""# qwen35-nano-4bit

A small text model in the Qwen 3.5 architecture (six gated-delta layers, two full ones), trained from scratch for tests
and demonstrations of block drafting. It is not a Qwen model and shares no weights with one. Its drafter, in the DFlash
architecture, is `qwen35-nano-dflash`. Both come from `tools/train_qwen35_nano.py` (seed {facts["seed"]}).

Hidden 128, 4 query and 2 KV heads of 64 (16 elements turned), 2 key and 4 value heads of 32, MLP 256, vocabulary 1,024
(byte-level BPE), no token that begins every prompt. MLX affine format, 4 bits in groups of 64; the drafter is bf16.

Data: the sources of Python's standard library (PSF-2.0), {data["files"]:,} files and {data["bytes"] / 1e6:.1f} MB, of
which {data["held_out_files"]} files were held out. Nothing was downloaded.

Training, on a CPU: the target {target["steps"]:,} steps of 1,536 tokens ({target["tokens"] / 1e6:.1f} M) in
{target["seconds"]} s, the last third on fake-quantized weights; the drafter {drafter["steps"]:,} steps in
{drafter["seconds"]} s on {drafter["sequences"]} greedy texts of the quantized target and its hidden states. Rates
follow the clock, so two runs differ in their bits.

Measured on the quantized weights: {target["held_out_loss"]} nats per token on held-out text; shares of right drafts by
position on texts kept apart, each counted on its own: {right}.
"""
