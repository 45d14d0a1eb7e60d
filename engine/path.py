"""Which kernels a block and classic decode take, by name: what a flag or a stage comes to, whatever it is called.

Two settings with one path compute the same; a benchmark that compares them compares nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.dispatch import DispatchPolicy
from engine.prefill import plan_prefill

REACHING = frozenset(
    {"qmv_multirow", "qmv_multirow_max_rows", "sdpa_large_d", "compiled_mlp", "prefill_chunk", "enable_tf32"}
)
"""Fields of `Flags` that can change a kernel; `kernel_path` holds what each comes to."""

LAUNCHING = frozenset({"use_cuda_graphs"})
"""Fields of `Flags` that can change how the same kernels are launched, so speed and no byte; `kernel_path` holds it."""

NOT_REACHING = {"allow_inexact": "it decides whether rounds run, not how"}
"""Fields of `Flags` that change neither kernels nor launches, with the reason."""


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

    `bits` are those of the MLP's matrices, `prompts` (tokens, history boundary) say how prefill is cut, `fused` whether
    the backend has ops for a step in few launches, which on CUDA are recorded as graphs unless the flag says no.
    """
    in_few = "recorded" if cuda and policy.flags.use_cuda_graphs else "few"
    path = {"backend": policy.backend, "rows": str(rows)}
    for mode, count, decode in (("verify", rows, False), ("classic", 1, True)):
        attention = {kind: policy.attention(count, kind, decode) for kind in ("sliding", "full")}
        rope = policy.rope(count, decode)
        path[f"{mode} linear"] = policy.linear(count)
        path |= {f"{mode} attention, {kind}": kernel for kind, kernel in attention.items()}
        path |= {f"{mode} geglu, {b} bits": policy.geglu(count, b, decode) for b in sorted(set(bits))}
        path[f"{mode} rope"] = rope
        whole = all(kernel == "row" for kernel in attention.values())
        path[f"{mode} launches"] = "one per op" if not fused or rope != "row" else in_few if whole else "few"
    cuts = [plan_prefill(tokens, boundary, policy.flags.prefill_chunk) for tokens, boundary in prompts]
    path["prefill"] = "; ".join(" ".join(f"{part.start}..{part.stop}" for part in cut) for cut in cuts)
    path["tf32"] = str(policy.flags.enable_tf32).lower() if cuda else "not reached"  # prefill multiplies in fp32
    return path


def effect_note(field: str, policy: DispatchPolicy, *, cuda: bool, dtype: str) -> str:
    """Why a flag has no effect in this process, or an empty string."""
    if field == "enable_tf32":  # in every dtype: prefill's attention and recurrence are fp32
        return "" if cuda else "no effect: a CPU has no TF32 products"
    if field == "qmv_multirow_max_rows" and not policy.flags.qmv_multirow:
        return "no effect: MLXCEL_QMV_MULTIROW is off"
    if field == "use_cuda_graphs":
        return "reaches speed, no byte" if cuda else "no effect: a CPU has no CUDA graphs"
    return f"no effect: {NOT_REACHING[field]}" if field in NOT_REACHING else ""


def config_words(config: Any) -> str:
    """A text config's shapes in one line; a config of another family has words of its own."""
    if isinstance(own := getattr(config, "words", None), str):
        return own
    kinds = []
    for kind in ("sliding", "full"):
        same = [shape for shape in config.layers if shape.kind == kind]
        if same:
            shape = same[0]
            kinds.append(f"{len(same)} {kind} {shape.num_heads}/{shape.num_kv_heads} x {shape.head_dim}")
    return (
        f"hidden {config.hidden_size}, MLP {config.intermediate_size}, {', '.join(kinds)}, "
        f"window {config.sliding_window}, vocabulary {config.vocab_size}"
    )
