"""Where a spec's files are: prompts beside it, checkpoints beside it or under $HARNESS_MODELS.

Reads the file system and the environment, nothing else; no file outside its roots is ever named. A pair that was
grown in place of missing checkpoints is found in the cache.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from harness import grown
from harness.spec.model import Prompt
from harness.spec.pair_model import CheckpointRef, Pair

MODELS_VARIABLE = "HARNESS_MODELS"


def models_root(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder of real checkpoints, or None when the variable is not set."""
    value = (os.environ if environ is None else environ).get(MODELS_VARIABLE, "")
    return Path(value).expanduser() if value else None


def path_problem(path: str, roots: str = "the spec's folder") -> str | None:
    """Why a path may not stand in a spec, or None: specs name nothing absolute and nothing above their roots."""
    parts = PurePosixPath(path.replace("\\", "/"))
    if parts.is_absolute() or path.startswith("~") or (len(path) > 1 and path[1] == ":"):
        return f"'{path}' is not relative; name it relative to {roots}"
    if ".." in parts.parts:
        return f"'{path}' leads out of {roots}"
    if "\0" in path or not parts.parts:
        return f"{path!r} is not a path"
    return None


def find_checkpoint(path: str, folder: Path, root: Path | None) -> Path | None:
    """The checkpoint's folder: beside the spec, else under the models root, else None."""
    for base in (folder, root):
        if base is not None and (base / path).is_dir():
            return base / path
    return None


def missing_reason(ref: CheckpointRef, folder: Path, root: Path | None) -> str | None:
    """Why a checkpoint cannot be used here, naming it; None when it is there."""
    if find_checkpoint(ref.path, folder, root) is not None:
        return None
    state = "not set" if root is None else "not in that folder" if root.is_dir() else "that folder does not exist"
    reason = f"needs checkpoint {ref.path} beside the spec or under ${MODELS_VARIABLE} ({state})"
    if ref.otherwise is not None:
        reason += f"; a machine with CUDA has it grown to {ref.otherwise.grow} geometry from nano"
    return reason


def growable(pair: Pair | None, folder: Path, root: Path | None) -> str | None:
    """The geometry that a missing pair is grown to. None where a checkpoint is there: a real one gets no grown mate."""
    if pair is None:
        return None
    wanted = {ref.otherwise.grow if ref.otherwise is not None else None for ref in (pair.target, pair.drafter)}
    if len(wanted) > 1 or any(find_checkpoint(ref.path, folder, root) for ref in (pair.target, pair.drafter)):
        return None
    return wanted.pop()


def pair_folders(pair: Pair, folder: Path, root: Path | None) -> tuple[Path | None, Path | None]:
    """Folders of the target and the drafter: the spec's own, else those of a grown pair that is cached, else None."""
    geometry = growable(pair, folder, root)
    if geometry is not None and (cached := grown.existing(geometry)) is not None:
        return cached
    return find_checkpoint(pair.target.path, folder, root), find_checkpoint(pair.drafter.path, folder, root)


def missing_checkpoints(pair: Pair | None, folder: Path, root: Path | None, *, real: bool = False) -> tuple[str, ...]:
    """Reasons for the target, then the drafter; empty when both are there, and without a pair.

    A grown pair that is cached counts, unless they must be `real`.
    """
    if pair is None or (not real and all(pair_folders(pair, folder, root))):
        return ()
    reasons = (missing_reason(ref, folder, root) for ref in (pair.target, pair.drafter))
    return tuple(dict.fromkeys(reason for reason in reasons if reason is not None))


def prompt_label(prompt: Prompt, index: int) -> str:
    """The prompt's name in tables."""
    if prompt.name is not None:
        return prompt.name
    return PurePosixPath(prompt.file).stem if prompt.file is not None else f"text{index + 1}"


def prompt_text(prompt: Prompt, folder: Path) -> str:
    """The prompt's text, exactly as stored. Raises ValueError with one line on what is wrong."""
    if prompt.file is None:
        text = prompt.text or ""
        if not text.strip():
            raise ValueError("the prompt is empty")
        return text
    if problem := path_problem(prompt.file):
        raise ValueError(problem)
    path = folder / prompt.file
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"'{prompt.file}' leads out of the spec's folder")
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file '{prompt.file}' is not UTF-8 (byte {error.start})") from None
    except FileNotFoundError:
        raise ValueError(f"prompt file '{prompt.file}' is not in the spec's folder") from None
    except OSError as error:
        raise ValueError(f"cannot read prompt file '{prompt.file}': {error.strerror}") from None
    if not text.strip():
        raise ValueError(f"prompt file '{prompt.file}' is empty")
    return text
