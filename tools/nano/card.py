"""Model cards of the nano pair, written from the figures that the stages left in the work folder."""

from __future__ import annotations

from typing import Any

COMMAND = "python tools/train_nano_pair.py --work build/nano --out specs/checkpoints"


def _licences(packages: dict[str, Any]) -> str:
    by_licence: dict[str, list[str]] = {}
    for name, entry in packages.items():
        by_licence.setdefault(str(entry["licence"]), []).append(name)
    lines = [f"- {licence}: {', '.join(sorted(names))}" for licence, names in sorted(by_licence.items())]
    return "\n".join(lines)


def _percent(values: list[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)


def _data(manifest: dict[str, Any]) -> str:
    return f"""## Data

Source files and documentation of {len(manifest["packages"])} Python packages that were installed on the training
machine, the standard library among them. Nothing was downloaded. Only packages whose own metadata declares an open
licence were read; folders with borrowed code, files whose head names another licence, and generated-looking files were
left out. {manifest["files"]:,} files, {manifest["bytes"] / 1e6:.0f} MB, duplicates dropped by content hash;
{manifest["held_out_files"]:,} whole files ({manifest["held_out_bytes"] / 1e6:.1f} MB) held out by content hash.
{manifest["conversations"]:,} conversations in Gemma's turn form were made from documented functions of the training
files ({100 * manifest["conversation_share_of_bytes"]:.0f} % of the text). {manifest["train_tokens"] / 1e6:.1f} M tokens
of training text. Files, bytes and licence of every package: `data_manifest.json`.
"""


def target_card(state: dict[str, Any], manifest: dict[str, Any]) -> str:
    """README.md of the target checkpoint."""
    train, held = state["target"], state["evaluate"]["held_raw"]
    chat = state["evaluate"]["held_chat"]
    rows = "\n".join(
        f"| `{name}` | {entry['form']} | {entry['prompt_tokens']} | {entry['distinct_tokens']} |"
        f" {entry['least_distinct']} | {entry['acceptance_length']:.2f} |"
        for name, entry in state.get("prompts", {}).items()
    )
    return f"""# gemma4-nano-it-4bit

A small text model in the Gemma 4 unified architecture, trained from scratch for tests and demonstrations of
multi-token prediction. It is not a Google model and shares no weights with one. Its drafter is
`gemma4-nano-it-assistant-4bit`.

18 layers (5 sliding with a window of 1,024, then 1 full, three times), hidden 256, 4 query heads, 2 sliding KV heads
of 64, 1 full KV head of 128 whose values are its keys, MLP 768, vocabulary 4,096 (byte-level BPE with Gemma's special
tokens at Gemma's ids), soft cap 30. MLX affine format: 4 bits in groups of 64, 8 bits in the MLP.

{_data(manifest)}
## Training

One H200, bf16 with fp32 masters, sequences of {train["length"]:,} tokens, {train["steps"]:,} steps of
{train["batch"] * train["length"]:,} tokens ({train["tokens"] / 1e6:.0f} M in all) in {train["seconds"]:.0f} s, of which
{train["compile_seconds"]:.0f} s compiling. Layer matrices by Muon, the rest by AdamW; the last
{100 * (1 - train["quantize_from"]):.0f} % of the time on fake-quantized weights. The learning rate follows the clock,
so two runs differ in their bits.

## Measured on the quantized weights

| text | tokens | loss (nats per token) |
|---|---|---|
| held-out files | {held["tokens"]:,} | {held["loss"]:.3f} |
| held-out conversations | {chat["tokens"]:,} | {chat["loss"]:.3f} |

Greedy text, 256 tokens, stop tokens ignored. A small model loops easily, and a loop flatters acceptance, so distinct
tokens stand beside every acceptance length. The prompts (`specs/prompts/`) are own words or this repository's own
source, so none of them was trained on; they were chosen among candidates for not looping. *Least* is over the numeric
variants that were tried ({", ".join(state.get("variants", []))}).

| prompt | form | prompt tokens | distinct tokens of 256 | least | tokens per round |
|---|---|---|---|---|---|
{rows}

## Limits

It writes plausible Python and documentation, not correct ones. Held-out files come from the same packages as the
training files, and packages copy from each other, so the held-out loss is a lower bound for other code.

## Reproduce

    {COMMAND}

on a machine with one CUDA device and Python packages to read; well under 20 minutes there.
{_seconds(state)}

## Licences of the packages read

{_licences(manifest["packages"])}
"""


def drafter_card(state: dict[str, Any], manifest: dict[str, Any]) -> str:
    """README.md of the drafter checkpoint."""
    train = state["drafter"]
    rows = "\n".join(
        f"| {label} | {entry['tokens']:,} | {_percent(entry['agreement'])} | {entry['tokens_per_round']:.2f} |"
        for label, entry in (
            ("held-out files", state["evaluate"]["held_raw"]),
            ("held-out conversations", state["evaluate"]["held_chat"]),
        )
    )
    prompts = "\n".join(
        f"| `{name}` | {entry['distinct_tokens']} | {entry['acceptance_length']:.2f} | {entry['acceptance_rate']:.2f} |"
        for name, entry in state.get("prompts", {}).items()
    )
    return f"""# gemma4-nano-it-assistant-4bit

The multi-token drafter of `gemma4-nano-it-4bit`, in the Gemma 4 unified assistant architecture; of no use without it.
Not a Google model. Four query-only layers (3 sliding, 1 full) over the target's last sliding and last full K/V, hidden
128, MLP {train["intermediate_size"]}, own tied table of 4,096, MLX affine format with 4 bits in groups of 64.

## Training

Distilled on the *quantized* target's own final-normed hidden rows and K/V, three unrolled steps, its own output fed
back, the position constant within a round; half cross entropy to the target's choice, half to its distribution. One
H200, {train["steps"]:,} steps of {train["batch"] * train["length"]:,} tokens in {train["seconds"]:.0f} s, of which
{train["compile_seconds"]:.0f} s compiling; the last {100 * (1 - train["quantize_from"]):.0f} % on fake-quantized
weights. Text and licences: see the card of the target ({manifest["train_tokens"] / 1e6:.1f} M tokens, nothing
downloaded).

## Measured on the quantized pair

Teacher-forced: the text stands where drafted tokens would. Tokens per round at block size 4, the target's own included.

| text | rows | agreement at draft steps 1 / 2 / 3 | tokens per round |
|---|---|---|---|
{rows}

On the target's own greedy text, 256 tokens:

| prompt | distinct tokens of 256 | tokens per round | accepted / drafted |
|---|---|---|---|
{prompts}

## Limits

Agreement is that of one small pair on text like its training text: held-out files share packages, and copied passages,
with training files. It says nothing about other pairs.

## Reproduce

    {COMMAND}
"""


def _seconds(state: dict[str, Any]) -> str:
    names = ("data", "target", "drafter", "evaluate", "candidates")
    stages = {name: state[name]["stage_seconds"] for name in names if name in state}
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in stages.items())
    return (
        f"Stages of the committed run, compilation included: {parts}; together {sum(stages.values()) / 60:.1f} minutes."
    )
