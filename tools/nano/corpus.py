"""Training text from what is installed on this machine: nothing is downloaded.

Python sources and documentation of openly licensed packages and of the standard library; duplicates dropped by
content hash, whole files held out by content hash, packages and licences recorded in a manifest.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
OPEN_LICENCES = (
    "mit", "mit-cmu", "hpnd", "bsd", "bsd-2-clause", "bsd-3-clause", "0bsd", "apache-2.0", "psf-2.0", "python-2.0",
    "isc", "zlib", "unlicense", "cc0-1.0", "blueoak-1.0.0", "bsl-1.0", "mit-0", "ncsa",
)  # fmt: skip
OPEN_CLASSIFIERS = (
    "mit license", "mit no attribution", "bsd license", "apache software license", "python software foundation",
    "isc license", "zlib", "unlicense", "historical permission notice", "cmu license", "public domain",
)  # fmt: skip
NOT_OPEN = re.compile(r"\b(a?gpl|lgpl|gnu|mpl|mozilla|proprietary|eula|commercial|nvidia|other)\b", re.IGNORECASE)
FREE_TEXT = re.compile(r"\b(mit|bsd|apache|psf|python software foundation|isc|zlib)\b", re.IGNORECASE)
BORROWED = re.compile(r"(^|/)(_?vendor(ed)?|third_party|extern(al|als)?|_distutils)(/|$)")
HEAD_NOT_OPEN = re.compile(
    r"GNU (Lesser |Affero )?General Public|Mozilla Public License|NVIDIA (CORPORATION|End User)|LicenseRef-Nvidia"
    r"|proprietary|All Rights Reserved\. This software",
    re.IGNORECASE,
)
MIN_BYTES, MAX_BYTES = 200, 200_000
MAX_SQUEEZE = 9.0
MAX_LONG_LINE = 400
HELD_OUT_OF_256 = 4


@dataclass(frozen=True)
class Document:
    """One text file: where it came from, its text, and whether it is kept out of training."""

    package: str
    name: str
    text: str
    held_out: bool


def open_licence(metadata: importlib.metadata.PackageMetadata) -> str | None:
    """The open licence that a package declares, or None where it declares none, another or a mix with another.

    Reads the SPDX expression, else the classifiers, else the free text field if it is short.
    """
    expression = metadata.get("License-Expression")
    if expression:
        parts = re.findall(r"[A-Za-z0-9.+-]+", re.sub(r"\bWITH\s+\S+", "", expression))
        names = [part.lower() for part in parts if part.upper() not in ("AND", "OR")]
        return expression if names and all(name in OPEN_LICENCES for name in names) else None
    classifiers = [c.split("::")[-1].strip() for c in metadata.get_all("Classifier") or [] if c.startswith("License")]
    classifiers = [c for c in classifiers if c != "OSI Approved"]
    if classifiers:
        good = all(any(word in c.lower() for word in OPEN_CLASSIFIERS) for c in classifiers)
        return " AND ".join(classifiers) if good else None
    text = (metadata.get("License") or "").strip()
    if text and len(text) < 100 and FREE_TEXT.search(text) and not NOT_OPEN.search(text):
        return text
    return None


def clean_text(raw: bytes) -> str | None:
    """The file's text, or None where it is no text, too small or large, generated, or under another licence."""
    if not MIN_BYTES <= len(raw) <= MAX_BYTES or b"\0" in raw:
        return None
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    if HEAD_NOT_OPEN.search(text[:3000]):
        return None
    lines = text.splitlines()
    if max(map(len, lines), default=0) > MAX_LONG_LINE:
        return None
    if len(raw) / len(zlib.compress(raw, 1)) > MAX_SQUEEZE:
        return None
    return "\n".join(line.rstrip() for line in lines).strip() + "\n"


def installed_files() -> tuple[list[tuple[str, str, Path]], dict[str, str]]:
    """(package, relative name, path) of every candidate file, and the licence of every package used."""
    files: list[tuple[str, str, Path]] = []
    licences: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata.get("Name")
        licence = open_licence(distribution.metadata)
        if not name or licence is None or name in licences:
            continue
        licences[name] = licence
        for item in distribution.files or []:
            relative = str(item)
            if relative.startswith("..") or BORROWED.search(relative) or ".dist-info" in relative:
                continue
            if relative.endswith(SUFFIXES):
                files.append((name, relative, Path(str(distribution.locate_file(item)))))
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    licences["python standard library"] = "PSF-2.0"
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib).as_posix()
        if "site-packages" not in relative and "dist-packages" not in relative and not BORROWED.search(relative):
            files.append(("python standard library", relative, path))
    return files, licences


def collect(files: Iterable[tuple[str, str, Path]]) -> list[Document]:
    """Documents in the order of their content hash; equal content counts once."""
    seen: dict[bytes, Document] = {}
    for package, relative, path in files:
        try:
            text = clean_text(path.read_bytes())
        except OSError:
            continue
        if text is None:
            continue
        digest = hashlib.sha256(" ".join(text.split()).encode()).digest()
        if digest not in seen:
            seen[digest] = Document(package, relative, text, digest[0] < HELD_OUT_OF_256)
    return [seen[digest] for digest in sorted(seen)]


def manifest(documents: list[Document], licences: dict[str, str]) -> dict[str, object]:
    """What the corpus holds: packages with version-free names, licences, file and byte counts."""
    packages: dict[str, dict[str, object]] = {}
    for document in documents:
        entry = packages.setdefault(
            document.package, {"licence": licences[document.package], "files": 0, "bytes": 0, "held_out_files": 0}
        )
        entry["files"] = int(str(entry["files"])) + 1
        entry["bytes"] = int(str(entry["bytes"])) + len(document.text.encode())
        entry["held_out_files"] = int(str(entry["held_out_files"])) + int(document.held_out)
    return {
        "source": "packages installed on the training machine; nothing was downloaded",
        "files": len(documents),
        "bytes": sum(len(d.text.encode()) for d in documents),
        "held_out_files": sum(d.held_out for d in documents),
        "held_out_bytes": sum(len(d.text.encode()) for d in documents if d.held_out),
        "packages": dict(sorted(packages.items())),
    }
