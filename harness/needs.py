"""What a case needs and this machine may lack: checkpoints, CUDA, memory. It is skipped with the reason, or demanded.

A case that lacks weights which `--require` demands fails: the lane was set up wrong. Without CUDA, memory or a quiet
CPU it could not be measured, which is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from harness import gate
from harness.checks.base import Judgement
from harness.errors import GateError, HarnessError, RunError
from harness.grown import Grower
from harness.process import Child
from harness.protocol import Setup
from harness.record.lines import Outcome
from harness.spec.plan import Case
from harness.spec.resolve import growable, missing_checkpoints, models_root

NO_GPUS: dict[str, Any] = {"cuda": False, "reason": "", "gpus": []}


class Needs:
    """Answers for one run and one place."""

    def __init__(
        self,
        *,
        device: str | None,
        require: Iterable[str],
        log_dir: Path,
        command: tuple[str, ...],
        pinned: Mapping[str, str],
        grower: Grower,
        note: Callable[[str], None],
    ) -> None:
        self.device = device
        self.require = frozenset(require)
        self._log_dir = log_dir
        self._command = command
        self._pinned = dict(pinned)
        self._grower = grower
        self._note = note
        self._not_grown: dict[str, HarnessError] = {}  # by geometry; tried once
        self._machine: dict[str, Any] | None = None

    def device_of(self, case: Case) -> str:
        """Where a case runs."""
        return device_of(case, self.device)

    def judgement(self, case: Case) -> Judgement | None:
        """Skipped, or refused under `--require`, or None to go on."""
        if case.skip is not None:
            return Judgement("skipped", case.skip)
        try:
            lacking = self._lacking(case)
            missing = [("weights", reason) for reason in self._absent(case, fit=not lacking)] + lacking
        except HarnessError as error:
            return Judgement("error", str(error))
        demanded = {what: reason for what, reason in missing if what in self.require}
        if demanded:
            outcome: Outcome = "fail" if "weights" in demanded else "error"
            reasons = "; ".join(reason for what, reason in missing if what in demanded)
            return Judgement(outcome, f"{reasons} (--require {','.join(sorted(demanded))})")
        if missing:
            return Judgement("skipped", "; ".join(reason for _, reason in missing))
        return None

    def _absent(self, case: Case, fit: bool) -> tuple[str, ...]:
        """Reasons for checkpoints that are not here; a pair that may be grown is, on a GPU that is `fit` for it."""
        root = models_root()
        reasons = missing_checkpoints(case.pair, case.folder, root, real="weights" in self.require)
        geometry, device = growable(case.pair, case.folder, root), self.device_of(case)
        if not (reasons and geometry and fit and device.startswith("cuda")) or "weights" in self.require:
            return reasons
        if obstacle := self._grower.obstacle(geometry):
            return tuple(f"{reason}; {obstacle}" for reason in reasons)
        if geometry not in self._not_grown:
            try:
                self._grower.grow(geometry, device, self._log_dir / f"grow-{geometry}.log", self._note)
                return ()
            except HarnessError as error:
                self._not_grown[geometry] = error
        raise self._not_grown[geometry]

    def _lacking(self, case: Case) -> list[tuple[str, str]]:
        """What the machine lacks for a case: a word for `--require`, and the reason."""
        device = self.device_of(case)
        needs_cuda = any(part.cuda for part in case.requires)
        if not needs_cuda and not device.startswith("cuda"):
            return _lacking_memory(case, gate.memory_available_bytes())
        if not device.startswith("cuda"):
            return [("cuda", f"needs CUDA, and this run is on {device}")]
        machine = self.machine()
        if not machine["cuda"]:
            if not needs_cuda:
                raise GateError(f"device {device}: {machine['reason']}")
            return [("cuda", f"needs CUDA ({machine['reason']})")]
        gpu = self.gpu_of(device)
        lacking = _lacking_memory(case, int(gpu["free_gib"] * 2**30))
        have = _capability(gpu["compute_capability"])
        for part in case.requires:
            if part.compute_capability and have < _capability(part.compute_capability.removeprefix(">=")):
                reason = f"needs compute capability {part.compute_capability}, {gpu['name']} has "
                lacking.append(("cuda", reason + gpu["compute_capability"]))
        return lacking

    def machine(self) -> dict[str, Any]:
        """What torch sees on this machine: asked once, of a child that loads nothing."""
        if self._machine is None:
            log = self._log_dir / "machine.log"
            child = Child("machine", {}, log, command=self._command, pinned=self._pinned)
            try:
                with child:
                    child.start(Setup())
                    self._machine = child.run("machine").data
            except RunError as error:
                self._machine = {**NO_GPUS, "reason": str(error)}
        return self._machine

    def gpu_of(self, device: str) -> dict[str, Any]:
        """What torch says of the GPU that a device word means. Raises GateError for one that is not there."""
        seen = self.machine()["gpus"]
        _, _, index = device.partition(":")
        number = int(index) if index.isdigit() else 0
        if number >= len(seen):
            last = f"cuda:0 to cuda:{len(seen) - 1} are" if len(seen) > 1 else "only cuda:0 is" if seen else "none is"
            raise GateError(f"device {device}: {last} visible here; choose another with --device")
        return dict(seen[number])


def device_of(case: Case, asked: str | None) -> str:
    """Where a case runs: as asked, else on CUDA when it requires that, else on the CPU."""
    return asked or ("cuda" if any(part.cuda for part in case.requires) else "cpu")


def _lacking_memory(case: Case, free: int | None) -> list[tuple[str, str]]:
    needed = max((part.memory_gib or 0.0 for part in case.requires), default=0.0)
    if free is None or free >= needed * 2**30:
        return []
    return [("memory", f"needs {needed:g} GiB of free memory, {free / 2**30:.1f} GiB are free")]


def _capability(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
