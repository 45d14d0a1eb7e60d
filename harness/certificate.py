"""The exactness certificate: what a passed probe proves, and whether that covers what an arm is about to run. Pure.

A certificate holds for one build, one device, one pair, one flag cell, one stage and one block size, on the inputs it
names. `match` lists every field by which it does not cover an arm; without a certificate that covers it an arm has no
speed-up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.record.lines import AnyLine, CertificateLine, Identity, PathLine, ProbeInput

WALK = "walk"
LONG_DRAW_EXTRA = 32  # as in engine.probe, which the parent cannot import without torch
HASHES = {
    "target": "the target's files",
    "drafter": "the drafter's files",
    "source": "the code of kernels and engine",
}
WORDS = {
    "torch": "torch",
    "triton": "triton",
    "driver": "driver",
    "device": "device",
    "compute_capability": "compute capability",
    "threads": "threads",
    "backend": "backend",
    "dtype": "dtype",
    "geometry": "geometry",
    "window": "window",
}


@dataclass(frozen=True)
class Wanted:
    """What an arm runs, and the furthest position it comes to (prompt and output tokens)."""

    identity: Identity
    flags: dict[str, str]
    stage: str
    block_size: int
    reach: int

    @classmethod
    def of(cls, path: PathLine, reach: int) -> Wanted:
        """What an arm's own statement of its kernels asks a certificate for."""
        return cls(path.identity, path.flags, path.stage, path.block_size, reach)


def make(
    case: str,
    identity: Identity,
    flags: dict[str, str],
    stage: str,
    block_size: int,
    inputs: Sequence[ProbeInput],
    classic_sha256: str,
) -> CertificateLine:
    """The certificate of a probe that passed on these inputs. Raises ValueError when nothing was compared."""
    if not inputs or any(one.rows < 1 or one.total_bytes < 1 for one in inputs):
        raise ValueError("a probe that compared nothing has no certificate")
    bare = CertificateLine(
        case=case,
        identity=identity,
        flags=flags,
        stage=stage,
        block_size=block_size,
        inputs=tuple(inputs),
        classic_sha256=classic_sha256,
        sha256="",
    )
    return bare.model_copy(update={"sha256": digest(bare)})


def digest(certificate: CertificateLine) -> str:
    """SHA-256 over all that a certificate states; a changed statement has another one."""
    stated = certificate.model_dump(mode="json", exclude={"line", "case", "sha256"})
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def walk_reach(certificate: CertificateLine) -> int:
    """The furthest position that a walk, which accepts and rolls back, came to; 0 without a walk."""
    return max((one.prompt_tokens + one.rows for one in certificate.inputs if one.name.startswith(WALK)), default=0)


def match(certificate: CertificateLine, wanted: Wanted) -> list[str]:
    """Why this certificate does not cover what is wanted, a reason per field; empty when it does."""
    reasons: list[str] = []
    if digest(certificate) != certificate.sha256:
        reasons.append("certificate was changed after it was written: its own SHA-256 does not fit")
    if certificate.block_size != wanted.block_size:
        reasons.append(f"certificate covers block size {certificate.block_size}, this arm runs {wanted.block_size}")
    if certificate.stage != wanted.stage:
        reasons.append(f"certificate covers stage {certificate.stage}, this arm runs {wanted.stage}")
    reasons += _identity_reasons(certificate.identity, wanted.identity)
    for name in sorted({*certificate.flags, *wanted.flags}):
        ours, theirs = certificate.flags.get(name, "nothing"), wanted.flags.get(name, "nothing")
        if ours != theirs:
            reasons.append(f"certificate is for {name}={ours}, this arm reads {theirs}")
    far = walk_reach(certificate)
    if not far:
        reasons.append("certificate has no walk, and this arm rolls back")
    elif far <= wanted.identity.window < wanted.reach:
        window = wanted.identity.window
        what = f"certificate's walks end at position {far}, this arm goes on to {wanted.reach}, past the window of"
        reasons.append(f"{what} {window} (a probe with a draw of {window + LONG_DRAW_EXTRA} tokens covers it)")
    return reasons


def _identity_reasons(ours: Identity, theirs: Identity) -> list[str]:
    found = []
    for field in Identity.model_fields:
        have, want = getattr(ours, field), getattr(theirs, field)
        if have == want:
            continue
        if field in HASHES:
            found.append(f"certificate is for other bytes of {HASHES[field]}: {have[:12]}, this arm has {want[:12]}")
        else:
            found.append(f"certificate is for {WORDS[field]} {have}, this arm runs on {want}")
    return found


def certificates_in(lines: Iterable[AnyLine]) -> tuple[CertificateLine, ...]:
    """The certificates among raw lines."""
    return tuple(line for line in lines if isinstance(line, CertificateLine))


def covering(certificates: Sequence[CertificateLine], wanted: Wanted) -> CertificateLine | None:
    """The certificate that covers what is wanted and compared most rows, or None."""
    found = [one for one in certificates if not match(one, wanted)]
    return max(found, key=lambda one: sum(each.rows for each in one.inputs), default=None)


def refusal(certificates: Sequence[CertificateLine], wanted: Wanted) -> str | None:
    """Why no certificate covers what is wanted, by the one that comes nearest; None when one does."""
    if covering(certificates, wanted) is not None:
        return None
    if not certificates:
        return "no probe left a sound exactness certificate"
    reasons: list[list[str]] = [match(one, wanted) for one in certificates]
    nearest = min(reasons, key=len)
    return "; ".join(nearest)
