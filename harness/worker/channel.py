"""The child's end of the pipe: a stdout that nothing else can write to, and an end when the parent is gone."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from typing import BinaryIO

from harness.protocol import LogEvent, Message
from harness.record.lines import Line

_PR_SET_PDEATHSIG = 1


class Channel:
    """Reads request lines, writes events."""

    def __init__(self) -> None:
        private = os.dup(1)
        os.dup2(2, 1)  # whatever prints from here on lands in the log, never between two events
        sys.stdout = sys.stderr
        self._out: BinaryIO = os.fdopen(private, "wb")
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._busy = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def emit(self, message: Message) -> None:
        """Write one event and flush it; a parent that is gone ends this process."""
        with self._lock:
            try:
                self._out.write(message.model_dump_json().encode() + b"\n")
                self._out.flush()
            except (BrokenPipeError, OSError):
                os._exit(1)

    def requests(self) -> Iterator[bytes]:
        """Request lines until the parent closes the pipe."""
        while (line := self._requests.get()) is not None:
            self._busy.set()
            yield line
            self._busy.clear()

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self._requests.put(line)
        if self._busy.is_set():
            os._exit(1)  # the parent went away in the middle of a job: nobody will read the result
        self._requests.put(None)


class EventHandler(logging.Handler):
    """Sends the engine's log lines to the parent; they go to the log file as well."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Forward one record."""
        self._channel.emit(LogEvent(level=record.levelname.lower(), message=record.getMessage()))


def die_with_parent() -> None:
    """On Linux, ask the kernel to end this process when the parent's thread dies; elsewhere the closed pipe does."""
    if not sys.platform.startswith("linux"):
        return
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return


def as_line(line: Line) -> dict[str, object]:
    """A raw line as JSON data for a `RawLine` event."""
    return line.model_dump(mode="json")
