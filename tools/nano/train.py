"""Training loops of the nano target and of its drafter, each inside a fixed time budget.

The target learns to predict text and ends on fake-quantized weights; the drafter learns to predict what the
quantized target will choose, from the target's own hidden rows and K/V, over three unrolled steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.quantize import fake_quantize
from tools.nano.model import Runner, Weights, head, init_weights, make_runner
from tools.nano.optim import Clock, Optimizer, rate_factor, working_weights
from tools.nano.shape import DraftShape, NanoShape

DRAFT_STEPS = 3
Say = Callable[[str], None]


@dataclass(frozen=True)
class TrainPlan:
    """How long and on what: budget in seconds, batch and length in tokens, share at which quantization starts."""

    seconds: float
    batch: int = 64
    length: int = 2048
    quantize_from: float = 0.6
    device: str = "cpu"
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = False
    seed: int = 0
    max_steps: int = 10**9


@dataclass(frozen=True)
class TrainResult:
    """Masters (fp32, on the CPU) and what the training took."""

    masters: dict[str, torch.Tensor]
    steps: int
    tokens: int
    seconds: float
    compile_seconds: float
    last_loss: float


def windows(stream: torch.Tensor, plan: TrainPlan, extra: int) -> Iterator[torch.Tensor]:
    """Endless batches [batch, length + extra] of int64 ids: each pass cuts the stream anew and shuffles the cuts."""
    generator = torch.Generator().manual_seed(plan.seed + 1)
    offsets = torch.arange(plan.length + extra, device=stream.device)
    while True:
        shift = int(torch.randint(plan.length, (1,), generator=generator))
        count = (len(stream) - shift - extra) // plan.length
        if count < 1:
            raise ValueError(f"the text has {len(stream)} tokens, fewer than one window of {plan.length + extra}")
        starts = shift + torch.randperm(count, generator=generator) * plan.length
        if count < plan.batch:
            starts = starts.repeat(-(-plan.batch // count))
        for batch in starts.split(plan.batch):
            if len(batch) == plan.batch:
                yield stream[batch.to(stream.device).unsqueeze(1) + offsets].long()


def target_loss(hidden: torch.Tensor, table: torch.Tensor, labels: torch.Tensor, softcap: float) -> torch.Tensor:
    """Mean cross entropy of the next token (nats)."""
    logits = head(hidden, table, softcap).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def draft_loss(y: torch.Tensor, table: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Half cross entropy to the target's choice, half to its whole distribution (nats)."""
    drafted = F.log_softmax(F.linear(y, table).float(), -1)
    wanted = target_logits.float()
    hard = -drafted.gather(-1, wanted.argmax(-1, keepdim=True)).mean()
    soft = -(wanted.softmax(-1) * drafted).sum(-1).mean()
    return 0.5 * (hard + soft)


def _compiled(plan: TrainPlan, function: Any) -> Any:
    return torch.compile(function, dynamic=False) if plan.compiled else function


class _Pace:
    """Keeps the host at most two steps ahead of the device, so that the clock means something."""

    def __init__(self, device: str) -> None:
        self.cuda, self.events = device != "cpu", []  # type: ignore[var-annotated]

    def __call__(self) -> None:
        if self.cuda:
            event = torch.cuda.Event()
            event.record()
            self.events.append(event)
            if len(self.events) > 2:
                self.events.pop(0).synchronize()


def run_loop(
    plan: TrainPlan,
    masters: dict[str, torch.Tensor],
    step: Callable[[bool], torch.Tensor],
    optimizer: Optimizer,
    say: Say,
    name: str,
) -> TrainResult:
    """Steps until the budget is used up; `step(quantized)` returns the loss with its gradients not yet taken."""
    clock, pace = Clock(plan.seconds), _Pace(plan.device)
    steps, loss_value, compile_seconds = 0, float("nan"), 0.0
    for quantized in (True, False):  # both paths compile before the schedule starts
        step(quantized).backward()
        for parameter in masters.values():
            parameter.grad = None
    if plan.device != "cpu":
        torch.cuda.synchronize()
    compile_seconds = clock.elapsed
    clock.compiled()
    while (share := max(clock.share, steps / plan.max_steps)) < 1.0:  # rates follow whatever ends the run
        loss = step(share >= plan.quantize_from)
        loss.backward()
        optimizer.step(rate_factor(share))
        pace()
        steps += 1
        if steps % 100 == 0 or steps == 10:
            loss_value = float(loss.detach())
            rate = steps * plan.batch * plan.length / max(clock.elapsed - compile_seconds, 1e-9)
            say(f"{name} step {steps} {clock.elapsed:.0f} s share {share:.2f} loss {loss_value:.3f} {rate:,.0f} tok/s")
    loss_value = float(loss.detach()) if steps else loss_value
    finished = {key: value.detach().cpu() for key, value in masters.items()}
    return TrainResult(finished, steps, steps * plan.batch * plan.length, clock.elapsed, compile_seconds, loss_value)


def train_target(shape: NanoShape, stream: torch.Tensor, plan: TrainPlan, say: Say) -> TrainResult:
    """Train a target on a token stream [N]; the last part of the budget runs on fake-quantized weights."""
    masters = init_weights(shape, plan.seed, plan.device)
    optimizer = Optimizer(masters)
    runner = make_runner(shape, plan.length, plan.device, plan.compiled)
    batches = windows(stream.to(plan.device), plan, 1)
    loss_of, quantizer = _compiled(plan, target_loss), _compiled(plan, fake_quantize)
    assert shape.softcap is not None

    def step(quantized: bool) -> torch.Tensor:
        tokens = next(batches)
        weights = working_weights(masters, shape, plan.dtype, quantized, quantizer)
        hidden, _ = runner.target(weights, tokens[:, :-1])
        loss: torch.Tensor = loss_of(hidden, weights["model.embed_tokens.weight"], tokens[:, 1:], shape.softcap)
        return loss

    return run_loop(plan, masters, step, optimizer, say, "target")


def unroll(
    target: Runner, drafter: Runner, target_weights: Weights, weights: Weights, tokens: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Three draft steps at every row of tokens [B, T + 3], the text itself as the drafted tokens.

    Row i stands for a round whose committed rows are 0..i and whose bonus token sits at i + 1; its position is i.
    Returns the three steps' y [B, T, h] and the target's final-normed hidden rows [B, T + 3, H].
    """
    length = tokens.shape[1] - DRAFT_STEPS
    with torch.no_grad():
        hidden, shared = target.target(target_weights, tokens)
        seen = {kind: (k[:, :, :length], v[:, :, :length]) for kind, (k, v) in shared.items()}
        embedded = target.embed(target_weights, tokens)
    g, outputs = hidden[:, :length], []
    for step in range(DRAFT_STEPS):
        y, g = drafter.draft(weights, embedded[:, 1 + step : 1 + step + length], g, seen)
        outputs.append(y)
    return outputs, hidden


def train_drafter(
    shape: DraftShape, target_shape: NanoShape, target_weights: Weights, stream: torch.Tensor, plan: TrainPlan, say: Say
) -> TrainResult:
    """Distil a drafter on a fixed (quantized) target over a token stream [N]."""
    masters = init_weights(shape, plan.seed + 7, plan.device)
    optimizer = Optimizer(masters)
    target = make_runner(target_shape, plan.length, plan.device, plan.compiled)
    drafter = make_runner(shape, plan.length - DRAFT_STEPS, plan.device, plan.compiled)
    batches = windows(stream.to(plan.device), plan, 0)
    loss_of, quantizer = _compiled(plan, draft_loss), _compiled(plan, fake_quantize)
    head_of = _compiled(plan, head)
    length = plan.length - DRAFT_STEPS

    def step(quantized: bool) -> torch.Tensor:
        tokens = next(batches)
        weights = working_weights(masters, shape, plan.dtype, quantized, quantizer)
        outputs, hidden = unroll(target, drafter, target_weights, weights, tokens)
        with torch.no_grad():
            logits = head_of(hidden, target_weights["model.embed_tokens.weight"], target_shape.softcap)
        total = torch.zeros((), device=plan.device)
        for index, y in enumerate(outputs):
            wanted = logits[:, 1 + index : 1 + index + length]
            total = total + loss_of(y, weights["model.embed_tokens.weight"], wanted)
        return total / DRAFT_STEPS

    started = time.monotonic()
    result = run_loop(plan, masters, step, optimizer, say, "drafter")
    say(f"drafter done after {time.monotonic() - started:.0f} s")
    return result
