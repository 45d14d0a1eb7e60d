"""Optimizer and schedules of the nano trainer.

Matrices inside the layers take Muon steps (orthogonalized momentum), tables, norms and scalars take AdamW steps.
Learning rates follow the share of the time budget that is used up, so a run always ends where it was told to.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import torch

from engine.quantize import GROUP_SIZE, fake_quantize
from tools.nano.shape import NanoShape

Quantizer = Callable[[torch.Tensor, int], torch.Tensor]


class StraightThrough(torch.autograd.Function):
    """Quantize on the way forward, pass the gradient through untouched on the way back."""

    @staticmethod
    def forward(ctx: object, weight: torch.Tensor, bits: int, quantizer: Quantizer) -> torch.Tensor:  # type: ignore[override]
        """Weights [N, 64] as a checkpoint would give them back."""
        return quantizer(weight, bits)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        """The gradient, unchanged."""
        return grad, None, None


def working_weights(
    masters: dict[str, torch.Tensor],
    shape: NanoShape,
    dtype: torch.dtype,
    quantized: bool,
    quantizer: Quantizer = fake_quantize,
) -> dict[str, torch.Tensor]:
    """Compute weights from fp32 masters: rounded to `dtype`, through the quantizer first where asked.

    All matrices of one bit width go through as one [groups, 64] tensor, which is the same groups row by row.
    """
    weights = {name: value.bfloat16().to(dtype) for name, value in masters.items() if value.ndim == 1}
    for bits in (4, 8):
        names = [name for name in masters if shape.bits(name) == bits]
        if not names:
            continue
        flat = torch.cat([masters[name].reshape(-1, GROUP_SIZE) for name in names])
        if quantized:
            flat = StraightThrough.apply(flat, bits, quantizer)
        pieces = flat.to(dtype).split([masters[name].numel() // GROUP_SIZE for name in names])
        weights.update({name: piece.view(masters[name].shape) for name, piece in zip(names, pieces, strict=True)})
    return weights


def orthogonalize(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Nearest orthogonal matrices of a stack [L, N, K], by the quintic Newton-Schulz iteration (Muon, Jordan 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16() if update.is_cuda else update.float()  # bf16 products are slow on many CPUs
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Momentum, orthogonalized per matrix, over stacks of equal shape."""

    def __init__(self, matrices: list[torch.Tensor], momentum: float = 0.95, decay: float = 0.1) -> None:
        """matrices: the parameters [N, K] to step; decay: decoupled weight decay per unit of learning rate."""
        groups: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self.groups = list(groups.values())
        self.buffers = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups]
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One Nesterov step at learning rate `rate` (units: spectral norm per step)."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grads = torch.stack([p.grad for p in group if p.grad is not None])
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonalize(grads.lerp(buffer, self.momentum))
            rows, columns = group[0].shape
            scale = rate * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind(0)), alpha=-scale)


class Optimizer:
    """Muon for layer matrices and projections, AdamW for everything else."""

    def __init__(self, masters: dict[str, torch.Tensor], muon_rate: float = 0.02, adam_rate: float = 3e-3) -> None:
        """masters: fp32 leaves by checkpoint name; the two rates are peaks."""
        matrices = [p for name, p in masters.items() if p.ndim == 2 and "embed_tokens" not in name]
        tables = [p for name, p in masters.items() if "embed_tokens" in name]
        vectors = [p for p in masters.values() if p.ndim == 1]
        self.parameters = list(masters.values())
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            [{"params": tables, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
            lr=adam_rate,
            betas=(0.9, 0.97),
        )
        self.muon_rate, self.adam_rate = muon_rate, adam_rate

    def step(self, factor: float) -> None:
        """One step at `factor` times the peak rates; clears the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * factor
        self.adam.step()
        self.muon.step(self.muon_rate * factor)
        for parameter in self.parameters:
            parameter.grad = None


class Clock:
    """Share of a time budget used up; the first steps (compilation) count towards it like all others."""

    def __init__(self, seconds: float) -> None:
        """seconds: the whole budget, from now."""
        self.start, self.seconds = time.monotonic(), seconds
        self.ramp_start = self.start

    def compiled(self) -> None:
        """Call once compilation is over: the schedule spreads over what is left."""
        self.ramp_start = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    @property
    def share(self) -> float:
        """0 when compilation ended, 1 when the budget is used up."""
        left = max(self.seconds - (self.ramp_start - self.start), 1e-9)
        return min((time.monotonic() - self.ramp_start) / left, 1.0)


def rate_factor(share: float, warmup: float = 0.02, flat_until: float = 0.35, floor: float = 0.01) -> float:
    """Peak-rate factor at a share of the budget: linear up, flat, linear down to `floor`."""
    if share < warmup:
        return max(share / warmup, 0.05)
    if share < flat_until:
        return 1.0
    return max(1.0 - (share - flat_until) / (1.0 - flat_until), floor)
