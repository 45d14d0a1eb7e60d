"""Process flags: one registry, and the only reader of them in the environment.

Names are the reference system's, so that its attribution matrices can be written down as they are.
Standard library only: the harness checks flags in a spec without loading the engine.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
MAX_PREFILL_CHUNK = 1 << 20


class FlagError(ValueError):
    """A flag in the environment has a value that it cannot take."""


@dataclass(frozen=True)
class Flag:
    """One registered flag: what it may be, what it does, and when it is read."""

    name: str
    field: str
    values: str
    default: str
    meaning: str
    read_when: str
    effect: str
    low: int | None = None
    high: int | None = None

    @property
    def is_switch(self) -> bool:
        """True for on/off flags, False for counts."""
        return self.low is None

    def parse(self, value: str) -> bool | int:
        """The value as the engine uses it; FlagError says what is allowed."""
        text = value.strip().lower()
        if self.is_switch:
            if text in _TRUE:
                return True
            if text in _FALSE:
                return False
        elif re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) and self.low is not None and self.high is not None:
            number = int(text)
            if self.low <= number <= self.high:
                return number
        raise FlagError(f"{self.name}={value!r}: allowed values are {self.values}")


@dataclass(frozen=True)
class Flags:
    """The flags' values after reading; defaults are what an empty environment gives."""

    qmv_multirow: bool = True
    qmv_multirow_max_rows: int = 8
    sdpa_large_d: bool = True
    allow_inexact: bool = False
    compiled_mlp: bool = True
    prefill_chunk: int = 2048
    enable_tf32: bool = True
    use_cuda_graphs: bool = True


@dataclass(frozen=True)
class FlagReading:
    """What the environment asked for and what took effect, both by flag name."""

    values: Flags
    requested: dict[str, str | None]
    effective: dict[str, str]


_SWITCH = "0/false/no/off, 1/true/yes/on"
_ONCE = "once, when the process starts"

_REGISTRY = (
    Flag(
        "MLXCEL_QMV_MULTIROW",
        "qmv_multirow",
        _SWITCH,
        "1",
        "one matrix product for all rows of a verify block",
        _ONCE,
        "0 launches every linear row by row; the bytes stay the same",
    ),
    Flag(
        "MLXCEL_QMV_MULTIROW_MAX_ROWS",
        "qmv_multirow_max_rows",
        "1..8",
        "8",
        "largest block that still takes one matrix product",
        _ONCE,
        "blocks with more rows launch every linear row by row; 1 is the same as MLXCEL_QMV_MULTIROW=0",
        1,
        8,
    ),
    Flag(
        "MLXCEL_SDPA_VECTOR_LARGE_D",
        "sdpa_large_d",
        _SWITCH,
        "1",
        "decode's fused one-row attention kernel in the layers of head_dim 256: Gemma's sliding, Qwen's full ones",
        _ONCE,
        "0 sends those layers to the unfused matmul, softmax, matmul path, in classic decode and in verify",
    ),
    Flag(
        "MLXCEL_MTP_ALLOW_INEXACT",
        "allow_inexact",
        _SWITCH,
        "0",
        "engage MTP although the exactness probe failed",
        _ONCE,
        "1 engages with a loud warning; every record that it touches says inexact",
    ),
    Flag(
        "MLXCEL_COMPILED_QGELU_MLP",
        "compiled_mlp",
        _SWITCH,
        "1",
        "the fused GeGLU (one rounding)",
        _ONCE,
        "0 computes GeGLU op by op (a rounding per op), in classic decode and in verify",
    ),
    Flag(
        "MLXCEL_PREFILL_CHUNK",
        "prefill_chunk",
        f"0..{MAX_PREFILL_CHUNK}",
        "2048",
        "prompt tokens per prefill forward after the history segment",
        _ONCE,
        "0 runs the prompt in one forward; another partition gives other K/V bytes, the same in both modes",
        0,
        MAX_PREFILL_CHUNK,
    ),
    Flag(
        "MLX_ENABLE_TF32",
        "enable_tf32",
        _SWITCH,
        "1",
        "TF32 in fp32 matrix products on CUDA",
        _ONCE,
        "reaches prefill's fp32 products on CUDA, of attention and of a recurrence, whatever the model's dtype; no CPU",
    ),
    Flag(
        "MLX_USE_CUDA_GRAPHS",
        "use_cuda_graphs",
        _SWITCH,
        "1",
        "CUDA graphs for whole steps",
        _ONCE,
        "0 launches a step's kernels one by one; CUDA only, the same kernels and bytes, so it reaches speed alone",
    ),
)

FLAGS: dict[str, Flag] = {flag.name: flag for flag in _REGISTRY}
"""Registered flags by name."""

UNSUPPORTED: dict[str, str] = {
    "MLX_CUDA_USE_CUDNN_SDPA": "there is no cuDNN attention in this engine to turn off",
    "MLXCEL_SDPA_FALLBACK_MAX_QUERIES": "block attention never reaches cuDNN here, so there is no row limit to move",
    "MLXCEL_SDPA_DETERMINISTIC": "attention here is deterministic always",
    "MLXCEL_QMV_WIDE": "it selects a Metal kernel; there is no Metal backend here",
    "MLXCEL_QMV_ROWS_PER_WARP": "kernel tuning is fixed per shape, not an environment choice",
    "MLXCEL_QMV_MIN_BLOCKS": "kernel tuning is fixed per shape, not an environment choice",
    "MLXCEL_ENABLE_MTP_B1": "a spec says whether MTP runs; there is no serving policy to pin",
    "MLXCEL_MTP_ADAPTIVE": "there is no adaptive policy: the probe decides once",
    "MLXCEL_MTP_TICK_SLICE": "there is no serving scheduler here",
    "MLXCEL_MTP_SLICE_GRANT_ROUNDS": "there is no serving scheduler here",
    "MLXCEL_ENABLE_MTP_BATCH": "batches above 1 are refused",
    "MLXCEL_ENABLE_MTP_BATCH_RAGGED": "batches above 1 are refused",
    "MLXCEL_MTP_BLOCK_CONTROLLER": "the block size is fixed by the spec",
    "MLXCEL_MTP_TREE": "drafts are linear; there are no trees",
    "MLXCEL_MTP_BRANCHES": "drafts are linear; there are no trees",
    "MLXCEL_MTP_MARGIN": "drafts are linear; there are no trees",
    "MLXCEL_MTP_DISABLE_DIVERGENT_FIX": "it concerns batched rounds, and batches above 1 are refused",
    "MLXCEL_MTP_QUANTIZE_DRAFTER": "a drafter runs in the bits of its checkpoint",
    "MLXCEL_MTP_DRAFT_PROFILE": "draft and verify times are always measured",
    "MLXCEL_MTP_GAP_LOG": "draft and verify times are always measured",
    "MLXCEL_DRAFT_KIND": "the spec's `pair.kind` says it",
    "MLXCEL_DRAFT_BLOCK_SIZE": "the spec's `block_size` says it",
    "MLXCEL_GDN_CHAIN_PARITY": "the recurrence of linear layers goes row by row; the stage `base` shows the other form",
    "MLXCEL_GLM_MTP_HIDDEN_TAP": "it concerns another model family",
    "MLXCEL_GEMMA4_ENABLE_FUSED_QKV": "q, k and v are always one product here",
    "MLXCEL_DISABLE_SINGLE_QUERY_MASKLESS": "the unfused path is chosen by MLXCEL_SDPA_VECTOR_LARGE_D and the stage",
    "MLXCEL_PRINT_TOKEN_IDS": "token ids are in the record's raw lines",
    "MLXCEL_SPECULATIVE_STOCHASTIC_ACCEPT": "decoding is greedy; there is no stochastic accept",
    "MLXCEL_SPECULATIVE_ACCEPT_DIAG": "acceptance is always in the record",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "there is no graph cache to size",
    "MLX_CUDA_SDPA_CACHE_SIZE": "there is no plan cache to size",
    "MLX_CUDA_ARCHITECTURES": "it is a build option of another program",
}
"""Flags of the same family that have no counterpart here, with the reason; refused, never ignored."""


def check_flag(name: str, value: str | None) -> str | None:
    """The reason why a spec may not set this flag to this value; None when it may. None as a value means unset."""
    if name in UNSUPPORTED:
        return f"{name} has no counterpart here: {UNSUPPORTED[name]}"
    flag = FLAGS.get(name)
    if flag is None:
        close = difflib.get_close_matches(name.upper(), FLAGS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known flags: {', '.join(FLAGS)}"
        return f"unknown flag {name}; {hint}"
    if value is None:
        return None
    try:
        flag.parse(value)
    except FlagError as error:
        return str(error)
    return None


def read_flags(environ: Mapping[str, str] | None = None) -> FlagReading:
    """Read all registered flags; FlagError for a malformed value or a flag without a counterpart."""
    source = os.environ if environ is None else environ
    for name in UNSUPPORTED:
        if name in source:
            raise FlagError(f"{name} has no counterpart here: {UNSUPPORTED[name]}; unset it")
    requested = {name: source.get(name) for name in FLAGS}
    values: dict[str, bool | int] = {}
    effective: dict[str, str] = {}
    for flag in _REGISTRY:
        raw = requested[flag.name]
        parsed = flag.parse(flag.default if raw is None else raw)
        values[flag.field] = parsed
        effective[flag.name] = str(int(parsed))
    return FlagReading(Flags(**values), requested, effective)  # type: ignore[arg-type]


def flags_markdown() -> str:
    """The registry as a markdown table, for the documentation."""
    head = "| flag | values | default | meaning | effect here |\n|---|---|---|---|---|\n"
    rows = (f"| `{f.name}` | {f.values} | {f.default} | {f.meaning} | {f.effect} |\n" for f in _REGISTRY)
    return head + "".join(rows)
