"""Main loop of a child: load the pair, then answer jobs until the pipe closes.

Every failure is one line of reason for the parent; its traceback goes to the log.
"""

from __future__ import annotations

import logging
import sys
import traceback

from pydantic import ValidationError

from harness.protocol import Failure, FailureKind, Job, Result, Setup
from harness.worker.channel import Channel, EventHandler, die_with_parent


def main() -> int:
    """Returns the exit code: 0 after a clean close, 3 when the pair could not be loaded."""
    die_with_parent()
    channel = Channel()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("engine").addHandler(EventHandler(channel))
    requests = channel.requests()
    first = next(requests, None)
    if first is None:
        return 0
    try:
        from harness.worker.bench import Bench, device_peak_bytes
        from harness.worker.jobs import run_job

        bench = Bench(Setup.model_validate_json(first))
    except Exception as error:
        channel.emit(_failure(error, None))
        return 3
    channel.emit(bench.ready())
    for line in requests:
        job_id: int | None = None
        try:
            job = Job.model_validate_json(line)
            job_id = job.id
            data = run_job(bench, job, channel)
            channel.emit(Result(job=job.id, data=data, peak_memory_bytes=device_peak_bytes(bench.device)))
        except Exception as error:
            channel.emit(_failure(error, job_id))
    return 0


def _failure(error: Exception, job: int | None) -> Failure:
    """What the parent is told; input and memory errors are expected, the rest also leaves a traceback in the log."""
    from engine.errors import EngineError
    from engine.flags import FlagError

    message = " ".join(str(error).split()) or type(error).__name__
    kind: FailureKind
    if isinstance(error, EngineError | FlagError):
        kind = "input"
    elif isinstance(error, MemoryError) or "out of memory" in message or "can't allocate memory" in message:
        kind, message = "memory", f"out of memory: {message}"
    else:
        traceback.print_exc(file=sys.stderr)
        kind = "internal"
        name = "bad request" if isinstance(error, ValidationError) else type(error).__name__
        message = f"{name}: {message}"
    return Failure(job=job, kind=kind, message=message[:2000])


if __name__ == "__main__":
    sys.exit(main())
