"""Which kernels a block and classic decode take in this family, by name; see `engine.path`."""

from __future__ import annotations

from collections.abc import Iterable

from engine.dispatch import DispatchPolicy
from engine.prefill import plan_prefill
from engine.qwen35.target import DISPATCHED_AS, delta_form


def kernel_path(
    policy: DispatchPolicy,
    rows: int,
    bits: Iterable[int],
    prompts: Iterable[tuple[int, int | None]] = (),
    *,
    cuda: bool,
    dtype: str,
    fused: bool,
) -> dict[str, str]:
    """Op -> kernel of a verify block of `rows` rows and of classic decode under a policy.

    The arguments are those of `engine.path.kernel_path`; bits and fused ops change nothing here.
    """
    path = {"backend": policy.backend, "rows": str(rows)}
    for mode, count, decode in (("verify", rows, False), ("classic", 1, True)):
        path[f"{mode} linear"] = policy.linear(count)
        path[f"{mode} attention, full"] = policy.attention(count, DISPATCHED_AS, decode)
        path[f"{mode} delta rule"] = delta_form(policy, count, decode)
        path[f"{mode} rope"] = policy.rope(count, decode)
        path[f"{mode} launches"] = "one per op"
    cuts = [plan_prefill(tokens, boundary, policy.flags.prefill_chunk) for tokens, boundary in prompts]
    path["prefill"] = "; ".join(" ".join(f"{part.start}..{part.stop}" for part in cut) for cut in cuts)
    path["tf32"] = str(policy.flags.enable_tf32).lower() if cuda else "not reached"
    return path
