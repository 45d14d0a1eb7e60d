"""What a record's certificates cover: which speed-ups may stand on the page, and the certificates themselves. Pure.

Checked again at every rendering, from the raw lines: a certificate that its own draws do not bear out covers nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness import certificate, coverage
from harness.pairs import NULL
from harness.record.lines import AnyLine, ArmLine, CertificateLine, DecisionLine, DrawLine, PathLine, StartLine
from harness.record.model import CertificateFigures
from harness.record.speed_model import ArmFigures, StepFigures

WITHHELD = "withheld: "


@dataclass(frozen=True)
class Certified:
    """The certificates of a run, and what they leave uncovered."""

    required: bool  # False: a record from before there were certificates
    refused: Mapping[str, Mapping[str, str]]  # case -> arm -> why it has no speed-up
    identical: Mapping[str, str]  # case -> the two arms that are one
    unsound: Mapping[str, str]  # case -> what contradicts its certificate
    figures: tuple[CertificateFigures, ...]

    def problems(self, case: str, measured: bool) -> list[str]:
        """What a case's certificates and kernels contradict; `measured` says that it states a speed."""
        found = [self.unsound[case]] if case in self.unsound else []
        if measured:
            found += [f"{arm} has a verdict, but {reason}" for arm, reason in self.refused.get(case, {}).items()]
            found += [self.identical[case]] if case in self.identical else []
        return found


def certify(starts: Sequence[StartLine], cases: Mapping[str, Sequence[AnyLine]]) -> Certified:
    """Match every timed arm of a run with the run's own certificates."""
    lines = [line for events in cases.values() for line in events]
    required = any(start.certified for start in starts)
    if not required and not any(isinstance(line, PathLine | CertificateLine) for line in lines):
        return Certified(False, {}, {}, {}, ())
    unsound = {case: text for case, events in cases.items() if (text := _unsound(events))}
    sound = [line for line in lines if not (isinstance(line, CertificateLine) and line.case in unsound)]
    refused: dict[str, dict[str, str]] = {}
    identical: dict[str, str] = {}
    covers: dict[str, list[str]] = {}
    for case, events in cases.items():
        reach = _reach(events)
        if found := {**coverage.refusals(sound, case, reach), **_other_sizes(events)}:
            refused[case] = found
        if text := coverage.identical_arms(events, case):
            identical[case] = text
        for arm, line in coverage.covered_by(sound, case, reach).items():
            covers.setdefault(line.sha256, []).append(f"{case.rpartition('::')[2]}: {arm}")
    distinct = {line.sha256: line for line in reversed(certificate.certificates_in(lines))}
    figures = tuple(_figures(line, covers.get(line.sha256, ())) for line in reversed(distinct.values()))
    return Certified(True, refused, identical, unsound, figures)


def _reach(events: Iterable[AnyLine]) -> dict[str, int]:
    """Timed arm -> the furthest position it came to; a null block's classic in an arm's place is none."""
    found: dict[str, int] = {}
    for line in events:
        if isinstance(line, ArmLine) and line.slot == "arm" and line.arm != NULL:
            found[line.arm] = max(found.get(line.arm, 0), line.prompt_tokens + line.tokens)
    return found


def _other_sizes(events: Sequence[AnyLine]) -> dict[str, str]:
    """Timed arms whose block size is not the one that their kernels were stated for, with the reason."""
    timed = {line.arm: line for line in events if isinstance(line, ArmLine) and line.slot == "arm"}
    paths = {line.arm: line for line in events if isinstance(line, PathLine) and line.arm}
    return {
        name: f"its kernels are stated for block size {paths[name].block_size}, it was timed at {line.block_size}"
        for name, line in timed.items()
        if name in paths and paths[name].block_size != line.block_size
    }


def _unsound(events: Sequence[AnyLine]) -> str | None:
    """What in a case's own lines contradicts its certificates, or None."""
    for line in events:
        if not isinstance(line, CertificateLine):
            continue
        name = f"certificate {line.sha256[:10]}"
        if certificate.digest(line) != line.sha256:
            return f"{name} was changed after it was written"
        draws = [draw for draw in events if isinstance(draw, DrawLine) and draw.block_size == line.block_size]
        passed = {(d.draw, d.prompt_tokens, d.positions, d.total_bytes) for d in draws if d.passed}
        stated = {(one.name, one.prompt_tokens, one.rows, one.total_bytes) for one in line.inputs}
        if draws and (stated - passed or len(passed) < len({draw.draw for draw in draws})):
            return f"{name} states draws that did not pass in this case"
        decisions = [one for one in events if isinstance(one, DecisionLine)]
        if not any(d.engaged and not d.inexact and d.classic_sha256 == line.classic_sha256 for d in decisions):
            return f"{name} stands beside no decision that engaged on its bytes"
    return None


def _figures(line: CertificateLine, covers: Sequence[str]) -> CertificateFigures:
    inputs = [one.name for one in line.inputs]
    return CertificateFigures(
        sha256=line.sha256,
        case=line.case.rpartition("::")[2],
        stage=line.stage,
        block_size=line.block_size,
        flags=line.flags,
        inputs=tuple(inputs),
        rows=sum(one.rows for one in line.inputs),
        total_bytes=sum(one.total_bytes for one in line.inputs),
        walk_reach=certificate.walk_reach(line),
        identity=line.identity.model_dump(),
        covers=tuple(covers),
    )


def withhold_arms(
    arms: Sequence[ArmFigures], without_speed: Sequence[ArmFigures], refused: Mapping[str, str]
) -> tuple[ArmFigures, ...]:
    """The arms; one that no certificate covers is taken from `without_speed`, its reason in place of a verdict's."""
    blank = {arm.arm: arm for arm in without_speed}
    return tuple(
        blank[arm.arm].model_copy(update={"verdict": "unresolved", "verdict_reason": WITHHELD + refused[arm.arm]})
        if arm.arm in refused
        else arm
        for arm in arms
    )


def with_speed(arms: Sequence[ArmFigures]) -> tuple[ArmFigures, ...]:
    """The arms that are not withheld: those a prediction may rest on."""
    return tuple(arm for arm in arms if not arm.verdict_reason.startswith(WITHHELD))


def withhold_steps(
    steps: Sequence[StepFigures], without_speed: Sequence[StepFigures], arms: Sequence[ArmFigures]
) -> tuple[StepFigures, ...]:
    """The step figures, without a predicted speed-up at the block size of an arm that is withheld."""
    sizes = {arm.block_size for arm in arms if arm.verdict_reason.startswith(WITHHELD)}
    pairs = zip(steps, without_speed, strict=True)
    return tuple(blank if full.block_size in sizes else full for full, blank in pairs)
