"""Which arms of a benchmark a certificate covers, and which differ in name only: from raw lines alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness import certificate
from harness.record.lines import AnyLine, CertificateLine, PathLine

NO_PATH = "the child did not state its kernels"


def arm_paths(lines: Iterable[AnyLine], case: str) -> dict[str, PathLine]:
    """What each arm of a case computes with, by arm; of a case that ran twice the last statement."""
    return {line.arm: line for line in lines if isinstance(line, PathLine) and line.case == case and line.arm}


def refusals(lines: Sequence[AnyLine], case: str, reach: Mapping[str, int]) -> dict[str, str]:
    """Arm -> why no certificate among the lines covers it; `reach` is each arm's furthest position."""
    paths, certificates = arm_paths(lines, case), certificate.certificates_in(lines)
    found: dict[str, str] = {}
    for arm, position in reach.items():
        path = paths.get(arm)
        wanted = certificate.Wanted.of(path, position) if path is not None else None
        reason = NO_PATH if wanted is None else certificate.refusal(certificates, wanted)
        if reason is not None:
            found[arm] = reason
    return found


def covered_by(lines: Sequence[AnyLine], case: str, reach: Mapping[str, int]) -> dict[str, CertificateLine]:
    """Arm -> the certificate that covers it."""
    paths, certificates = arm_paths(lines, case), certificate.certificates_in(lines)
    wanted = {arm: certificate.Wanted.of(paths[arm], far) for arm, far in reach.items() if arm in paths}
    chosen = {arm: certificate.covering(certificates, asked) for arm, asked in wanted.items()}
    return {arm: found for arm, found in chosen.items() if found is not None}


def identical_arms(lines: Iterable[AnyLine], case: str) -> str | None:
    """Two arms of a case that compute the same thing under two names, in words, or None."""
    first: dict[str, PathLine] = {}
    for line in arm_paths(lines, case).values():
        other = first.setdefault(line.fingerprint, line)
        if other is line:
            continue
        names = sorted(name for name in line.flags if line.flags[name] != other.flags.get(name))
        same = [f"{name}={other.flags.get(name)} and {line.flags[name]}" for name in names]
        why = f": {', '.join(same)} come to the same" if same else ""
        return f"arms identical: {other.arm} and {line.arm} run kernels {line.fingerprint[:12]}{why}"
    return None
