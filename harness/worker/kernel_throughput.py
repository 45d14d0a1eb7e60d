"""One kernel case: byte checks first, then times of every arm in turns; none where a row differs."""

from __future__ import annotations

import gc
from typing import Any

import torch

from harness.kernel_figures import OURS, STREAM
from harness.record.lines import CheckLine, KernelLine, PeerLine
from harness.worker import kernel_api
from harness.worker.bench import Bench, Output
from harness.worker.kernel_attention import AttentionBench
from harness.worker.kernel_checks import Found
from harness.worker.kernel_clock import KernelArm, fastest, time_arms, warm
from harness.worker.kernel_qmv import QmvBench

STREAM_BYTES = {"cuda": 2 << 30, "cpu": 1 << 20}


def run(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Args: those of the check, `shape` for qmv or `geometry`, `layer` and `context` for attention."""
    device = bench.device
    subject = QmvBench(args, device) if args["op"] == "qmv" else AttentionBench(args, device)
    try:
        out.line(subject.shape_line(out.case))
        exact = True
        for number, found in enumerate(subject.checks()):
            out.progress(number, 8, found.name)
            out.line(_statement(out.case, found))
            exact = exact and not found.differing
        if exact:
            _time(subject, args, device, out)
        return {"exact": exact}
    finally:
        del subject
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()


def _statement(case: str, found: Found) -> CheckLine:
    return CheckLine(
        case=case,
        name=found.name,
        passed=found.differing == 0,
        expected=f"0 of {found.total} bytes differ",
        found=found.words,
        differing_bytes=found.differing,
    )


def _time(subject: QmvBench | AttentionBench, args: dict[str, Any], device: str, out: Output) -> None:
    """Every arm in turns, ours at the first number of rows once more at the end of each repeat."""
    arms = subject.our_arms()
    for arm in arms:
        warm(arm)
    for name in args["peers"]:
        if name == STREAM:
            arms.append(_stream(device))
            out.line(PeerLine(case=out.case, peer=STREAM, note="a kernel that reads memory and does nothing else"))
            continue
        assert isinstance(subject, QmvBench)  # the loader refuses other peers of attention
        line, found = subject.peer(name, out.case)
        out.line(line)
        arms += found
    arms.append(_again(arms[0]))
    if not device.startswith("cuda"):
        for arm in arms:
            arm.clock = "host"
    repeats = args["repeats"]
    times = time_arms(arms, repeats, device, lambda done: out.progress(done, repeats, "timing"))
    for arm, us in zip(arms, times, strict=True):
        out.line(
            KernelLine(
                case=out.case,
                arm=arm.name,
                rows=arm.rows,
                launches=arm.launches,
                again=arm.again,
                nbytes=arm.nbytes,
                calls=arm.calls,
                clock=arm.clock,
                us=tuple(float(f"{value:.6g}") for value in us),
                rel_error=arm.rel_error,
            )
        )


def _stream(device: str) -> KernelArm:
    """The read-only stream: one call reads a buffer far larger than any cache."""
    nbytes, calls = kernel_api.stream(device, STREAM_BYTES["cuda" if device.startswith("cuda") else "cpu"])
    arm = KernelArm(STREAM, 0, nbytes, 1, fastest(calls, device))
    warm(arm)
    return arm


def _again(arm: KernelArm) -> KernelArm:
    """The null arm: the same arm a second time."""
    assert arm.name == OURS
    return KernelArm(arm.name, arm.rows, arm.nbytes, arm.calls, arm.run, arm.launches, again=True)
