"""What this process computes with, read back from what is loaded: identity, ledger, kernels by name, certificates."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import engine
import kernels
from engine.decision import Decision
from engine.flags import FLAGS
from engine.path import config_words, effect_note
from engine.probe import ProbeResult
from harness import certificate
from harness.process import THREAD_SETTINGS
from harness.provenance import TEXT_FILES, cpu_model
from harness.record.lines import CertificateLine, Identity, PathLine, ProbeInput, Setting

if TYPE_CHECKING:
    from harness.worker.bench import Bench

WHOLE_BYTES = 64 * 2**20
"""Weights up to this size are hashed whole, larger ones by a sample."""

SAMPLES, SAMPLE_BYTES = 256, 2**14
SAMPLED = " (weights sampled)"
CODE = (".py", ".json", ".cu")


def source_sha256(folders: Sequence[Path] | None = None) -> str:
    """SHA-256 over the code that decides bytes: every source file of kernels/ and engine/."""
    roots = folders or [Path(module.__file__).parent for module in (engine, kernels) if module.__file__]
    digest = hashlib.sha256()
    for root in roots:
        for file in sorted(found for found in root.rglob("*") if found.suffix in CODE):
            digest.update(f"{root.name}/{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def checkpoint_sha256(folder: Path) -> str:
    """SHA-256 over config, index, tokenizer files and weights; of large weights over sizes and evenly spaced samples.

    A sample finds another model or a conversion, not one changed value: reading every byte of a large checkpoint in
    each child would take longer than the probe.
    """
    digest = hashlib.sha256()
    for name in ("config.json", "model.safetensors.index.json", *TEXT_FILES):
        file = folder / name
        digest.update(f"{name}\0".encode() + (file.read_bytes() if file.is_file() else b"absent") + b"\0")
    shards = sorted(folder.glob("*.safetensors"))
    whole = sum(file.stat().st_size for file in shards) <= WHOLE_BYTES
    for file in shards:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\0".encode())
        with file.open("rb") as data:
            if whole:
                digest.update(data.read())
                continue
            for place in range(SAMPLES):
                data.seek((size - SAMPLE_BYTES) * place // (SAMPLES - 1))
                digest.update(data.read(SAMPLE_BYTES))
    return digest.hexdigest() + ("" if whole else SAMPLED)


def identity_of(bench: Bench) -> Identity:
    """What decides the bytes of this process, apart from flags, stage and shapes."""
    target, drafter = bench.pair.target, bench.pair.drafter
    cuda = str(target.device).startswith("cuda")
    geometry = config_words(target.config)
    if drafter is not None:
        geometry += f"; drafter {config_words(drafter.config)}"
    return Identity(
        target=checkpoint_sha256(Path(bench.setup.target or "")),
        drafter=checkpoint_sha256(Path(bench.setup.drafter)) if bench.setup.drafter else "none",
        source=source_sha256(),
        torch=str(torch.__version__),
        triton=_version("triton"),
        driver=driver_version() if cuda else "none",
        device=torch.cuda.get_device_name(target.device) if cuda else cpu_model()[0],
        compute_capability=capability(str(target.device)),
        threads=torch.get_num_threads(),
        backend=target.kernels.backend,
        dtype=_dtype(target),
        geometry=geometry,
        window=target.config.sliding_window or 0,
    )


def capability(device: str) -> str:
    """`9.0` of a GPU; of a CPU the instruction set that torch chose its kernels for."""
    if device.startswith("cuda"):
        return ".".join(map(str, torch.cuda.get_device_capability(device)))
    return str(torch.backends.cpu.get_cpu_capability())


def driver_version() -> str:
    """The GPU driver's version as the kernel module states it, else the CUDA version that it offers."""
    with contextlib.suppress(OSError):
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
        if found:
            return found.group(1)
    return f"CUDA {getattr(torch._C, '_cuda_getDriverVersion', lambda: 'not stated')()}"


def settings_of(bench: Bench) -> tuple[Setting, ...]:
    """The ledger as this child knows it: asked for and in force. The parent adds where it was asked for."""
    asked, read = bench.reading.requested, bench.reading.effective
    policy = bench.policy
    in_force = dict(read)
    if bench.device.startswith("cuda") and bench.pair is not None:
        in_force["MLX_ENABLE_TF32"] = str(int(torch.backends.cuda.matmul.allow_tf32))  # torch's own state
    cuda, dtype = bench.device.startswith("cuda"), "bfloat16" if bench.pair is None else _dtype(bench.pair.target)
    rows = [
        Setting(
            name=name,
            requested=asked[name],
            effective=in_force[name],
            source="",
            read=flag.read_when,
            note=effect_note(flag.field, policy, cuda=cuda, dtype=dtype),
        )
        for name, flag in FLAGS.items()
    ]
    loaded = "when the pair is loaded"
    target = bench.pair.target if bench.pair is not None else None
    device = str(target.device) if target is not None else bench.device
    threads = None if bench.setup.threads is None else str(bench.setup.threads)
    rows.append(_setting("device", bench.setup.device, device, loaded))
    rows.append(_setting("threads", threads, str(torch.get_num_threads()), "when the child starts"))
    if target is not None:
        rows.append(_setting("backend", None, target.kernels.backend, loaded))
        rows.append(_setting("dtype", None, _dtype(target), loaded))
    rows += [_setting(name, None, os.environ.get(name, "unset"), "when the child starts") for name in THREAD_SETTINGS]
    return tuple(rows)


def _setting(name: str, requested: str | None, effective: str, read: str) -> Setting:
    return Setting(name=name, requested=requested, effective=effective, source="", read=read)


def path_line(
    bench: Bench,
    case: str,
    stage: str,
    block_size: int,
    prompts: Sequence[tuple[int, int | None]],
    arm: str | None = None,
) -> PathLine:
    """The kernels of a block and of classic decode under a stage, read from the target that will run them."""
    target = bench.at(stage).target
    bits = [weight.bits for name, weight in target.linear_weights() if name.endswith("gate_proj+up_proj")]
    cuda = str(target.device).startswith("cuda")
    fused = target.kernels.fused is not None
    kernel_path = bench.pair.family.kernel_path
    path = kernel_path(target.policy, block_size, bits, prompts, cuda=cuda, dtype=_dtype(target), fused=fused)
    stated = json.dumps([bench.identity.model_dump(), block_size, path], sort_keys=True)
    return PathLine(
        case=case,
        arm=arm,
        stage=target.policy.stage,
        block_size=block_size,
        identity=bench.identity,
        flags=dict(bench.reading.effective),
        path=path,
        longest_prompt=max((tokens for tokens, _ in prompts), default=0),
        fingerprint=hashlib.sha256(stated.encode()).hexdigest(),
    )


def certificate_line(
    bench: Bench, case: str, stage: str, decision: Decision, result: ProbeResult | None
) -> CertificateLine | None:
    """The certificate of a probe that passed; None for one that failed, did not run, or was overridden."""
    if result is None or not result.passed or not decision.engaged or decision.inexact:
        return None
    inputs = [
        ProbeInput(name=one.name, prompt_tokens=one.prompt_length, rows=one.positions, total_bytes=one.total_bytes)
        for one in result.outcomes
    ]
    return certificate.make(
        case,
        bench.identity,
        dict(bench.reading.effective),
        bench.at(stage).target.policy.stage,
        result.outcomes[0].block_size,
        inputs,
        result.chain_sha256,
    )


def _dtype(target: Any) -> str:
    return str(target.dtype).removeprefix("torch.")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
