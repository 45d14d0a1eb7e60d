"""Train the nano pair from scratch: a small Gemma 4 target and its MTP drafter, as MLX-format checkpoints.

Reads text of the openly licensed Python packages installed on this machine and downloads nothing. One H200 needs
under 20 minutes for everything; `--tiny` runs all stages in seconds on a CPU, for tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.nano import card, data, evaluate, export
from tools.nano.choose import choose_prompts, committed_prompts
from tools.nano.shape import TINY, TINY_DRAFT, DraftShape, NanoShape
from tools.nano.train import TrainPlan, TrainResult, train_drafter, train_target

TARGET_NAME, DRAFTER_NAME = "gemma4-nano-it-4bit", "gemma4-nano-it-assistant-4bit"
STAGES = ("data", "target", "drafter", "evaluate", "prompts")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Job:
    """Arguments, shapes and the state file of a run; every stage picks up what the stages before it left."""

    def __init__(self, options: argparse.Namespace) -> None:
        """options: the parsed command line."""
        self.options = options
        self.work, self.out = Path(options.work), Path(options.out)
        self.device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
        self.target_shape: NanoShape = TINY if options.tiny else NanoShape()
        self.draft_shape: DraftShape = TINY_DRAFT if options.tiny else DraftShape()
        self.state_path = self.work / "state.json"
        self.state: dict[str, Any] = {}
        if self.state_path.exists():
            self.state = json.loads(self.state_path.read_text(encoding="utf-8"))

    def record(self, stage: str, started: float, **figures: Any) -> None:
        """Keep a stage's figures with the seconds it took."""
        self.state[stage] = {**figures, "stage_seconds": round(time.monotonic() - started, 1)}
        self.save()

    def save(self) -> None:
        """Write the state file."""
        self.state_path.write_text(json.dumps(self.state, indent=1) + "\n", encoding="utf-8")

    def stream(self, name: str) -> torch.Tensor:
        """A token stream of the data stage."""
        return torch.from_numpy(np.load(self.work / f"{name}.npy").astype(np.int16))

    def plan(self, seconds: float, batch: int, quantize_from: float) -> TrainPlan:
        """The training plan for this device."""
        tiny = self.options.tiny
        return TrainPlan(
            seconds=seconds,
            batch=4 if tiny else batch,
            length=64 if tiny else self.options.length,
            quantize_from=quantize_from,
            device=self.device,
            dtype=torch.float32 if tiny else torch.bfloat16,
            compiled=self.device == "cuda",
            seed=self.options.seed,
            max_steps=self.options.max_steps,
        )

    def pair(self) -> evaluate.Pair:
        """The exported pair, dequantized, on this device."""
        dtype = torch.float32 if self.options.tiny else torch.bfloat16
        target = export.load_weights(self.out / TARGET_NAME, self.target_shape, dtype, self.device)
        drafter = export.load_weights(self.out / DRAFTER_NAME, self.draft_shape, dtype, self.device)
        return evaluate.Pair(self.target_shape, target, self.draft_shape, drafter, self.device)


def say(text: str) -> None:
    """Progress to the terminal, at once."""
    print(text, flush=True)


def run_data(job: Job) -> None:
    """Text of this machine -> tokenizer and token streams."""
    started = time.monotonic()
    vocab = job.target_shape.vocab_size
    report = data.build(job.work, vocab, min(os.cpu_count() or 1, 16), job.options.seed, *job.options.documents)
    keys = ("files", "bytes", "held_out_files", "conversations", "train_tokens", "held_raw_tokens", "held_chat_tokens")
    job.record("data", started, **{key: report[key] for key in keys})
    say(f"data {job.state['data']}")


def _finish(
    job: Job, stage: str, started: float, result: TrainResult, plan: TrainPlan, shape: NanoShape, name: str
) -> None:
    save_file(result.masters, job.work / f"{stage}_masters.safetensors")
    names = TOKENIZER_FILES if stage == "target" else ()
    files = {file: (job.work / file).read_text(encoding="utf-8") for file in names}
    size = export.export(job.out / name, shape, result.masters, files)
    figures = dataclasses.asdict(dataclasses.replace(result, masters={}))
    del figures["masters"]
    job.record(
        stage, started, **figures, bytes=size, batch=plan.batch, length=plan.length,
        quantize_from=plan.quantize_from, intermediate_size=shape.intermediate_size,
    )  # fmt: skip
    say(f"{stage} {job.state[stage]}")


def run_target(job: Job) -> None:
    """Train and export the target."""
    started = time.monotonic()
    plan = job.plan(job.options.target_seconds, job.options.batch, 0.6)
    result = train_target(job.target_shape, job.stream("train"), plan, say)
    _finish(job, "target", started, result, plan, job.target_shape, TARGET_NAME)


def run_drafter(job: Job) -> None:
    """Distil and export the drafter on the exported target."""
    started = time.monotonic()
    plan = job.plan(job.options.drafter_seconds, job.options.drafter_batch, 0.5)
    target = export.load_weights(job.out / TARGET_NAME, job.target_shape, plan.dtype, job.device)
    result = train_drafter(job.draft_shape, job.target_shape, target, job.stream("train"), plan, say)
    _finish(job, "drafter", started, result, plan, job.draft_shape, DRAFTER_NAME)


def run_evaluate(job: Job) -> None:
    """Held-out figures of the exported pair."""
    started = time.monotonic()
    pair = job.pair()
    length, limit = (64, 4) if job.options.tiny else (2048, 128)
    figures = {
        name: evaluate.agreement(pair, job.stream(name), length, limit)
        for name in ("held_raw", "held_chat")
        if len(job.stream(name)) >= length
    }
    job.record("evaluate", started, **figures)
    say(f"evaluate {json.dumps(job.state['evaluate'])}")


def run_prompts(job: Job) -> None:
    """Try candidate prompts for a person to choose from, then measure the committed ones."""
    started = time.monotonic()
    tokenizer = Tokenizer.from_file(str(job.work / "tokenizer.json"))
    pair = job.pair()
    if job.options.candidates > 0:
        report = choose_prompts(pair, tokenizer, job.work, job.options.candidates, job.options.tiny, say)
        job.record("candidates", started, candidates=report["candidates"], spread=report["spread"])
    job.state["variants"], job.state["prompts"] = committed_prompts(pair, tokenizer, job.options.tiny)
    job.save()
    say(f"prompts {json.dumps(job.state['prompts'])}")


RUN: dict[str, Callable[[Job], None]] = {
    "data": run_data, "target": run_target, "drafter": run_drafter, "evaluate": run_evaluate, "prompts": run_prompts,
}  # fmt: skip


def write_cards(job: Job) -> None:
    """README.md of both checkpoints, once all figures are there."""
    if not {"target", "drafter", "evaluate", "data"} <= set(job.state):
        return
    manifest = json.loads((job.work / "manifest.json").read_text(encoding="utf-8"))
    if "held_chat" in job.state["evaluate"]:
        (job.out / TARGET_NAME / "README.md").write_text(card.target_card(job.state, manifest), encoding="utf-8")
        (job.out / DRAFTER_NAME / "README.md").write_text(card.drafter_card(job.state, manifest), encoding="utf-8")
        text = json.dumps(manifest, indent=1) + "\n"
        (job.out / TARGET_NAME / "data_manifest.json").write_text(text, encoding="utf-8")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", default="build/nano", help="folder for intermediate files (default: %(default)s)")
    parser.add_argument("--out", default="build/nano/out", help="folder for the two checkpoints")
    parser.add_argument("--stage", action="append", choices=STAGES, help="run only these stages (default: all)")
    parser.add_argument("--target-seconds", type=float, default=455.0)
    parser.add_argument("--drafter-seconds", type=float, default=190.0)
    parser.add_argument("--batch", type=int, default=64, help="sequences per target step")
    parser.add_argument("--drafter-batch", type=int, default=32, help="sequences per drafter step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument(
        "--candidates", type=int, default=100000, help="prompts to try at most; 0: only the committed ones"
    )
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, for tests")
    options = parser.parse_args(arguments)
    options.documents = ()
    return options


def main(arguments: list[str] | None = None, documents: tuple[Any, ...] = ()) -> int:
    """Run the stages; `documents` (documents, licences) replaces this machine's text in tests."""
    options = parse(arguments)
    options.documents = documents
    torch.set_float32_matmul_precision("high")
    job = Job(options)
    say("text comes from packages installed on this machine; nothing is downloaded")
    for stage in options.stage or STAGES:
        say(f"== {stage}")
        RUN[stage](job)
    write_cards(job)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
