"""`harness try`: one prompt through a spec's pair, as a user would meet it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from harness.cli.common import DEVICE, only_greedy
from harness.errors import UsageError
from harness.spec import load_spec


@click.command("try")
@click.argument("spec")
@click.option("--prompt", default=None, help="The prompt's text.")
@click.option("--file", "file", default=None, help="A text file with the prompt.")
@click.option("--form", type=click.Choice(["chat", "raw"]), default="chat", show_default=True, help="How it is sent.")
@click.option("--max-tokens", type=click.IntRange(1, 32768), default=128, show_default=True)
@click.option("--block-size", type=click.IntRange(2, 8), default=None, help="Rows per verify. [default: the pair's]")
@click.option(
    "--stage",
    type=click.Choice(["base", "attention", "attention_mlp", "rowwise"]),
    default="rowwise",
    show_default=True,
    help="Dispatch stage of the verify forward.",
)
@click.option("--classic", is_flag=True, help="Decode without the drafter too, and compare.")
@click.option("--ignore-stop", is_flag=True, help="Go on past stop tokens.")
@click.option("--temperature", type=float, default=0.0, help="Only 0 is possible.")
@click.option("--batch", type=int, default=1, help="Only 1 is possible.")
@click.option("--device", type=DEVICE, default=None, help="cpu, cuda or cuda:N. [default: what the spec requires]")
@click.option("--threads", type=click.IntRange(1), default=None, help="CPU threads of the child.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def try_spec(
    spec: str,
    prompt: str | None,
    file: str | None,
    form: str,
    max_tokens: int,
    block_size: int | None,
    stage: str,
    classic: bool,
    ignore_stop: bool,
    temperature: float,
    batch: int,
    device: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Generate from one prompt with SPEC's pair: the text, tok/s, acceptance, and whether MTP engaged."""
    from harness.trial import TrialResult, try_prompt

    only_greedy(temperature, batch)
    text = _prompt(prompt, file)
    result: TrialResult = try_prompt(
        load_spec(spec),
        text,
        form=form,
        max_tokens=max_tokens,
        block_size=block_size,
        device=device,
        stage=stage,
        ignore_stop=ignore_stop,
        classic=classic,
        threads=threads,
        on_text=None if as_json else lambda piece: click.echo(piece, nl=False),
    )
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), ensure_ascii=False))
        return
    click.echo(f"\n\n{result.log_line}")
    counts = f"{result.tokens} tokens ({result.distinct_tokens} distinct, ended by {result.finish_reason})"
    click.echo(f"{counts} after a prompt of {result.prompt_tokens}, first token after {result.ttft_s:.2f} s")
    click.echo(f"decode: {result.decode_tok_s:.2f} tok/s")
    if result.acceptance_rate is not None and result.acceptance_length is not None:
        rate, length = result.acceptance_rate, result.acceptance_length
        click.echo(f"acceptance: {rate:.3f} of the drafts, {length:.2f} tokens per verify")
    if result.classic_tok_s is not None:
        same = "the same text" if result.identical else "ANOTHER text"
        click.echo(f"classic: {result.classic_tok_s:.2f} tok/s, {same}")


def _prompt(prompt: str | None, file: str | None) -> str:
    if (prompt is None) == (file is None):
        raise UsageError("give the prompt with --prompt TEXT or --file PATH, one of the two")
    if prompt is not None:
        return prompt
    try:
        return Path(file or "").read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"--file {file}: not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"--file {file}: {error.strerror}") from None
