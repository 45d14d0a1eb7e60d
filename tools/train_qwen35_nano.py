"""Train the small Qwen 3.5 pair of `specs/qwen35_nano.yaml` on a CPU, and write it as checkpoints.

    python tools/train_qwen35_nano.py --out specs/checkpoints --minutes 12

The target is transformers' own model, trained on Python's standard library and quantized to 4 bits; the drafter is
distilled on the quantized target's own greedy text and hidden states. Needs the `test` extra (transformers).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

from engine.quantize import fake_quantize, quantize
from tools.nano.corpus import collect, installed_files, manifest
from tools.nano.optim import Muon
from tools.nano.tokens import tokenizer_files, train_tokenizer
from tools.qwen35.card import card
from tools.qwen35.dflash import block_logits, init
from tools.qwen35.shape import BITS, GROUP, QwenNano

LENGTH, BATCH = 128, 12
PROMPT, CONTINUATION = 32, 96
SEQUENCES, GENERATE_BATCH = 768, 64
ANCHORS, ROWS = 8, 8
QUANTIZED_SHARE = 0.35
ADAM_RATE, MUON_RATE = 4e-3, 0.02
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|turn>' ~ message['role'] ~ '\\n' ~ (message['content'] | trim) ~ '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>assistant\\n' -}}{%- endif -%}
"""


def main() -> int:
    """Train both models and write both folders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the two checkpoint folders")
    parser.add_argument("--minutes", type=float, default=12.0, help="training time of the target")
    parser.add_argument("--drafter-minutes", type=float, default=6.0, help="training time of the drafter")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    transformers.utils.logging.set_verbosity_error()
    shape = QwenNano()
    files, licences = installed_files()
    documents = [d for d in collect(f for f in files if f[0] == "python standard library") if d.name.endswith(".py")]
    train = [d.text for d in documents if not d.held_out]
    tokenizer = train_tokenizer(random.Random(args.seed).sample(train, 200), shape.vocab_size)
    stream = _encode(tokenizer, train)
    held_out = _encode(tokenizer, [d.text for d in documents if d.held_out])
    print(f"{len(train)} files, {stream.numel():,} tokens, {held_out.numel():,} held out")

    began = time.monotonic()
    model, steps = train_target(shape, stream, args.minutes * 60, args.seed)
    masters = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(quantized_state(masters))
    loss = held_out_loss(model, held_out)
    target_s = time.monotonic() - began
    print(f"target: {steps} steps in {target_s:.0f} s, held-out loss {loss:.3f} nats a token, quantized")

    began = time.monotonic()
    tokens = greedy_text(model, stream, args.seed)
    print(f"{tokens.shape[0]} greedy continuations in {time.monotonic() - began:.0f} s")
    began = time.monotonic()
    weights, draft_steps, hits = train_drafter(shape, model, tokens, args.drafter_minutes * 60, args.seed)
    drafter_s = time.monotonic() - began
    print(f"drafter: {draft_steps} steps in {drafter_s:.0f} s, right by position: {hits}")

    facts = {
        "seed": args.seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "target": {"steps": steps, "tokens": steps * BATCH * LENGTH, "seconds": round(target_s), "held_out_loss": loss},
        "drafter": {"steps": draft_steps, "seconds": round(drafter_s), "sequences": len(tokens), "right": hits},
        "data": manifest(documents, licences),
    }
    write_target(args.out / "qwen35-nano-4bit", shape, masters, tokenizer, facts)
    write_drafter(args.out / "qwen35-nano-dflash", shape, weights)
    return 0


def train_target(shape: QwenNano, stream: Tensor, seconds: float, seed: int) -> tuple[Any, int]:
    """The model after `seconds` of training, the last third of it on fake-quantized weights, and its steps."""
    config = transformers.Qwen3_5TextConfig(**shape.text_config())
    config._attn_implementation = "sdpa"
    model = transformers.Qwen3_5ForCausalLM(config)
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name}
    muon = Muon(list(matrices.values()), decay=0.0)
    others = [p for name, p in model.named_parameters() if name not in matrices]
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, weight_decay=0.0, betas=(0.9, 0.98))
    draws = windows(stream, LENGTH + 1, BATCH, seed)
    began, step = time.monotonic(), 0
    while (share := (time.monotonic() - began) / seconds) < 1:
        factor = min(1.0, (step + 1) / 20) * (1.0 if share < 0.4 else max(0.02, (1 - share) / 0.6))
        adam.param_groups[0]["lr"] = ADAM_RATE * factor
        batch = next(draws)
        loss = _loss(model, batch, quantized=share > 1 - QUANTIZED_SHARE)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        muon.step(MUON_RATE * factor)
        model.zero_grad()
        step += 1
        if step % 25 == 0:
            print(f"  step {step}, {100 * share:.0f} %, loss {loss.item():.3f}", flush=True)
    return model.eval(), step


def _loss(model: Any, batch: Tensor, quantized: bool) -> Tensor:
    """Cross-entropy of the next token, through 4-bit weights with a straight-through gradient if asked for."""
    inputs = {"input_ids": batch[:, :-1], "use_cache": False}
    if quantized:
        parameters = {name: _straight_through(p) if p.ndim == 2 else p for name, p in model.named_parameters()}
        logits = torch.func.functional_call(model, parameters, kwargs=inputs, tie_weights=True).logits
    else:
        logits = model(**inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def _straight_through(weight: Tensor) -> Tensor:
    return weight + (fake_quantize(weight, BITS, GROUP) - weight).detach()


def quantized_state(masters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every weight as it comes back from the checkpoint: matrices from 4 bits, the others from bf16."""
    state = {}
    for name, value in masters.items():
        stored = value.float()
        if "norm.weight" in name and "linear_attn" not in name:
            state[name] = (stored + 1.0).bfloat16().float() - 1.0  # MLX stores 1 + w
        else:
            state[name] = fake_quantize(stored, BITS, GROUP) if stored.ndim == 2 else stored.bfloat16().float()
    return state


@torch.inference_mode()
def held_out_loss(model: Any, stream: Tensor) -> float:
    """Nats per token over held-out text."""
    draws = windows(stream, LENGTH + 1, BATCH, 1)
    return round(sum(_loss(model, next(draws), False).item() for _ in range(8)) / 8, 3)


@torch.inference_mode()
def greedy_text(model: Any, stream: Tensor, seed: int) -> Tensor:
    """[n, prompt + continuation] tokens: text, then what the target itself says after it."""
    draws, found = windows(stream, PROMPT, GENERATE_BATCH, seed + 1), []
    for _ in range(SEQUENCES // GENERATE_BATCH):
        prompts = next(draws)
        found.append(
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=CONTINUATION,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        )
    return torch.cat(found).clone()


def train_drafter(
    shape: QwenNano, model: Any, tokens: Tensor, seconds: float, seed: int
) -> tuple[dict[str, Tensor], int, list[float]]:
    """Weights after `seconds`, steps, and the share of right drafts by position on sequences kept apart."""
    table = model.get_input_embeddings().weight.detach().clone()
    taps = tapped(shape, model, tokens)
    kept = len(tokens) // 12
    weights = init(shape, seed + 2)
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3, weight_decay=0.0, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(seed + 3)
    emphasis = 0.85 ** torch.arange(ROWS - 1)
    began, step = time.monotonic(), 0
    while (share := (time.monotonic() - began) / seconds) < 1:
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * max(0.02, min(1.0, 1.4 * (1 - share)))
        chosen = torch.randint(kept, len(tokens), (BATCH,), generator=generator)
        starts = torch.randint(PROMPT, tokens.shape[1] - ROWS, (ANCHORS,), generator=generator)
        loss = _draft_loss(shape, weights, table, taps[chosen], tokens[chosen], starts, emphasis)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            print(f"  draft step {step}, {100 * share:.0f} %, loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        starts = torch.arange(PROMPT, tokens.shape[1] - ROWS, 11)
        logits = block_logits(shape, weights, table, taps[:kept], tokens[:kept], starts, ROWS)
        right = (logits.argmax(-1) == _labels(tokens[:kept], starts)).float().mean((0, 1))
    return {name: w.detach() for name, w in weights.items()}, step, [round(x, 3) for x in right.tolist()]


def _draft_loss(
    shape: QwenNano,
    weights: dict[str, Tensor],
    table: Tensor,
    taps: Tensor,
    tokens: Tensor,
    starts: Tensor,
    emphasis: Tensor,
) -> Tensor:
    """Cross-entropy of the target's own next tokens, earlier drafts first: a wrong one voids those after it."""
    logits = block_logits(shape, weights, table, taps, tokens, starts, ROWS)
    losses = F.cross_entropy(logits.flatten(0, 2), _labels(tokens, starts).flatten(), reduction="none")
    return (losses.view(-1, ROWS - 1) * emphasis).sum() / (emphasis.sum() * losses.numel() / (ROWS - 1))


def _labels(tokens: Tensor, starts: Tensor) -> Tensor:
    return tokens[:, starts[:, None] + torch.arange(1, ROWS)]


@torch.inference_mode()
def tapped(shape: QwenNano, model: Any, tokens: Tensor) -> Tensor:
    """Hidden states after the tapped layers, side by side [n, T, layers * H]."""
    found = []
    for part in tokens.split(GENERATE_BATCH):
        states = model(part, output_hidden_states=True, use_cache=False).hidden_states
        found.append(torch.cat([states[layer + 1] for layer in shape.taps], -1))
    return torch.cat(found).clone()


def windows(stream: Tensor, length: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Endless random windows [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, stream.numel() - length, (batch,), generator=generator)
        yield stream[starts[:, None] + torch.arange(length)]


def _encode(tokenizer: Any, texts: list[str]) -> Tensor:
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        ids += [*encoding.ids, 1]
    return torch.tensor(ids)


def write_target(
    folder: Path, shape: QwenNano, masters: dict[str, Tensor], tokenizer: Any, facts: dict[str, Any]
) -> None:
    """The target in MLX's layout, its tokenizer, and how it came about.

    Takes the weights before quantization: to quantize what has been through it gives other codes.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in masters.items():
        if name == "lm_head.weight":
            continue
        name = f"language_model.{name}"
        value = value.float()
        if value.ndim == 2:
            module = name.removesuffix(".weight")
            packed = quantize(value.bfloat16(), BITS, GROUP)
            tensors |= dict(zip((name, f"{module}.scales", f"{module}.biases"), packed, strict=True))
        elif value.ndim == 3:
            tensors[name] = value.transpose(1, 2).contiguous().bfloat16()
        elif "norm.weight" in name and "linear_attn" not in name:
            tensors[name] = (value + 1.0).bfloat16()
        else:
            tensors[name] = value.bfloat16()
    _write(folder, shape.target_config(), tensors)
    files = tokenizer_files(tokenizer)
    settings = json.loads(files["tokenizer_config.json"])
    files["tokenizer_config.json"] = (
        json.dumps({**settings, "bos_token": None, "add_bos_token": False}, indent=2) + "\n"
    )
    files["chat_template.jinja"] = CHAT_TEMPLATE
    files["README.md"] = card(facts)
    files["training.json"] = json.dumps(facts, indent=2) + "\n"
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def write_drafter(folder: Path, shape: QwenNano, weights: dict[str, Tensor]) -> None:
    """The drafter, plain bf16."""
    _write(folder, shape.drafter_config(), {name: value.bfloat16() for name, value in weights.items()})


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "mlx"})


if __name__ == "__main__":
    sys.exit(main())
