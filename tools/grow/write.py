"""Writes safetensors shards tensor by tensor, so that a checkpoint of any size needs the memory of its largest matrix.

All places are known before anything is built; shards are filled side by side.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.grow.build import NAMES, Module

SHARD_BYTES = 2_000_000_000
WORKERS = 8
Done = Callable[[int], None]


@dataclass(frozen=True)
class Shard:
    """Modules of one file."""

    file: str
    modules: tuple[Module, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(part.nbytes for module in self.modules for part in module.parts)


def cut(modules: Sequence[Module], limit: int = SHARD_BYTES) -> list[Shard]:
    """Modules in order into files of at most `limit` bytes; a module stays in one piece."""
    groups: list[list[Module]] = [[]]
    size = 0
    for module in modules:
        own = sum(part.nbytes for part in module.parts)
        if size + own > limit and groups[-1]:
            groups.append([])
            size = 0
        groups[-1].append(module)
        size += own
    count = len(groups)
    return [Shard(f"model-{i:05d}-of-{count:05d}.safetensors", tuple(group)) for i, group in enumerate(groups, 1)]


def layout(shard: Shard) -> tuple[bytes, dict[str, int]]:
    """The file's head, and where each tensor starts in the file; wide elements first, so that all are aligned."""
    parts = sorted((part for module in shard.modules for part in module.parts), key=lambda part: -part.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    starts: dict[str, int] = {}
    end = 0
    for part in parts:
        starts[part.name] = end
        header[part.name] = {
            "dtype": NAMES[part.dtype], "shape": list(part.shape), "data_offsets": [end, end + part.nbytes],
        }  # fmt: skip
        end += part.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, {name: start + 8 + len(text) for name, start in starts.items()}


def write_shard(folder: Path, shard: Shard, device: str, done: Done) -> None:
    """Build and write the tensors of one shard."""
    head, starts = layout(shard)
    with (folder / shard.file).open("wb") as file:
        file.write(head)
        file.truncate(len(head) + shard.nbytes)
        for module in shard.modules:
            for part, value in module.build(device):
                file.seek(starts[part.name])
                file.write(value.contiguous().view(torch.uint8).cpu().numpy().data)
                done(part.nbytes)


def write_weights(folder: Path, modules: Sequence[Module], device: str, done: Done, limit: int = SHARD_BYTES) -> None:
    """All shards and their index."""
    shards = cut(modules, limit)
    index = {part.name: shard.file for shard in shards for module in shard.modules for part in module.parts}
    total = sum(shard.nbytes for shard in shards)
    with ThreadPoolExecutor(min(len(shards), WORKERS)) as pool:
        for result in [pool.submit(write_shard, folder, shard, device, done) for shard in shards]:
            result.result()
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def write_json(file: Path, value: Mapping[str, object]) -> None:
    """A JSON file with an end of line."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
