"""`harness try`: one prompt through a spec's pair as a user sees it: text, rate, acceptance, engaged or declined."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import gate
from harness.errors import RunError, UsageError
from harness.process import JOB_TIMEOUT_S, WORKER_COMMAND, Child, stray_flags
from harness.protocol import AnyEvent, Setup, Text
from harness.spec.load import LoadedSpec
from harness.spec.resolve import missing_checkpoints, models_root, pair_folders


@dataclass(frozen=True)
class TrialResult:
    """What one generation was like; classic's figures only when they were asked for."""

    text: str
    engaged: bool
    inexact: bool
    log_line: str
    prompt_tokens: int
    tokens: int
    distinct_tokens: int
    finish_reason: str
    ttft_s: float
    decode_tok_s: float
    acceptance_rate: float | None
    acceptance_length: float | None
    classic_tok_s: float | None = None
    identical: bool | None = None


def try_prompt(
    loaded: LoadedSpec,
    prompt: str,
    *,
    form: str = "chat",
    max_tokens: int = 256,
    block_size: int | None = None,
    device: str | None = None,
    stage: str = "rowwise",
    ignore_stop: bool = False,
    classic: bool = False,
    threads: int | None = None,
    on_text: Callable[[str], None] | None = None,
    command: tuple[str, ...] = WORKER_COMMAND,
) -> TrialResult:
    """Generate once in a child of its own; `on_text` gets the text in pieces as it appears."""
    if not prompt.strip():
        raise UsageError("the prompt is empty; give some text with --prompt")
    if max_tokens < 1:
        raise UsageError(f"max tokens {max_tokens}: ask for at least 1")
    if block_size is not None and not 2 <= block_size <= 8:
        raise UsageError(f"block size {block_size}: a block has 2 to 8 rows")
    if stray := stray_flags():
        raise UsageError(f"{', '.join(stray)} is set in the shell and would not reach the child: unset it")
    spec, root = loaded.spec, models_root()
    if spec.pair is None:
        raise UsageError(f"{loaded.id_path} has no pair to generate with; name a spec that has one")
    missing = missing_checkpoints(spec.pair, loaded.folder, root)
    if missing:
        raise RunError("; ".join(missing))
    target, drafter = (folder for folder in pair_folders(spec.pair, loaded.folder, root) if folder is not None)
    where = device or ("cuda" if spec.requires.cuda else "cpu")
    gate.check_memory((target, drafter), where)
    chosen = threads or gate.default_threads((target, drafter), where)
    pieces: list[str] = []

    def receive(event: AnyEvent) -> None:
        if isinstance(event, Text):
            pieces.append(event.text)
            if on_text is not None:
                on_text(event.text)

    with tempfile.TemporaryDirectory(prefix="harness-try-") as logs:
        log = Path(logs) / "try.log"
        with Child("try", {}, log, command=command, keep_log=False) as child:
            child.start(Setup(target=str(target), drafter=str(drafter), device=where, threads=chosen))
            data = child.run(
                "try",
                "try",
                {
                    "prompt": {"name": "prompt", "form": form, "text": prompt},
                    "block_size": block_size or spec.pair.block_size,
                    "max_tokens": max_tokens,
                    "ignore_stop": ignore_stop,
                    "stage": stage,
                    "classic": classic,
                },
                timeout_s=JOB_TIMEOUT_S,
                on_event=receive,
            ).data
    return TrialResult(text="".join(pieces), **data)
