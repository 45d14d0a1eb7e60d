"""Which function answers which job: one module per kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness.protocol import Job
from harness.worker import (
    decline,
    generate,
    geometry,
    kernel_rows,
    kernel_throughput,
    machine,
    parity,
    peer_decode,
    probe,
    rollback,
    row_identity,
    steps,
    trial,
)
from harness.worker.bench import Bench, Output
from harness.worker.channel import Channel

Runner = Callable[[Bench, dict[str, Any], Output], dict[str, Any]]
RUNNERS: dict[str, Runner] = {
    "machine": machine.run,
    "geometry": geometry.run,
    "row_identity": row_identity.run,
    "kernel_rows": kernel_rows.run,
    "kernel_throughput": kernel_throughput.run,
    "probe": probe.run,
    "parity": parity.run,
    "generate": generate.run,
    "steps": steps.run,
    "decode_ours": peer_decode.run_ours,
    "decode_peer": peer_decode.run_peer,
    "decline": decline.run,
    "rollback": rollback.run,
    "try": trial.run,
}


def run_job(bench: Bench, job: Job, channel: Channel) -> dict[str, Any]:
    """Run one job; its raw lines go out as they arise, its data is returned."""
    with torch.inference_mode():
        return RUNNERS[job.kind](bench, job.args, Output(channel, job.id, job.case))
