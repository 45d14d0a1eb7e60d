"""Reads a checkpoint folder: config.json, safetensors in one file or in shards, MLX affine or plain floats.

Every way in which files can be broken or contradict their config is one CheckpointError line with
file, tensor, what was expected and what was found. Names come out without their outer prefix.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import CheckpointError
from engine.files import read_json_object, where
from engine.quantize import GROUP_SIZE, dequantize
from engine.reading import DTYPES, Meter, read_tensor
from kernels import Stored, Weight

INDEX_NAME = "model.safetensors.index.json"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_SIZED_BY = {
    "pre_projection.weight": " (hidden_size x twice backbone_hidden_size)",
    "post_projection.weight": " (backbone_hidden_size x hidden_size)",
}
_PREFIXES = ("language_model.model.", "model.language_model.", "model.")
_OTHER_TOWERS = (
    "vision_tower.",
    "visual.",
    "vision_embedder.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "multi_modal_projector.",
    "mtp.",
)
_UNREAD_SUFFIXES = ("rotary_emb.inv_freq",)
_DRAFTER_UNREAD = (".k_proj.", ".v_proj.", ".k_norm.")
_MAX_HEADER_BYTES = 100 << 20
_FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Entry:
    """One stored tensor: its file, the name inside it, dtype as safetensors spells it, shape, first byte there."""

    file: Path
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Quantization:
    """The config's `quantization` section: defaults, and what single modules say instead."""

    bits: int
    group_size: int
    overrides: Mapping[str, tuple[int, int] | None]

    def of(self, module: str) -> tuple[int, int] | None:
        """(bits, group size) of a module, or None where it is not quantized."""
        return self.overrides.get(module, (self.bits, self.group_size))


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder; tensors are read when asked for."""

    path: Path
    config: Mapping[str, Any]
    entries: Mapping[str, Entry]
    quantization: Quantization | None
    meter: Meter = field(default_factory=Meter, compare=False)

    @property
    def name(self) -> str:
        """The folder's name, without its path."""
        return self.path.name

    def verify(self, shapes: Mapping[str, tuple[int, ...]], role: Literal["target", "drafter"]) -> None:
        """Every tensor of `shapes` is there in its shape and its bits, and nothing else; CheckpointError otherwise."""
        wanted = set()
        for name, shape in shapes.items():
            wanted |= self._verify_tensor(name, shape)
        for name, entry in self.entries.items():
            if name in wanted or (role == "drafter" and any(part in name for part in _DRAFTER_UNREAD)):
                continue
            raise self._fail(entry.file.name, f"{entry.stored_name} is not part of a {role} of this config; remove it")

    def weight(self, module: str, dtype: torch.dtype, device: str = "cpu") -> Weight:
        """A module's matrix [N, K] in `dtype`, dequantized when asked for where it is stored in 4 or 8 bits."""
        data = self.tensor(f"{module}.weight", device)
        spec = self._bits_of(module)
        if spec is None:
            return Weight(data.to(dtype), data.element_size() * 8)
        bits, group = spec
        words, scales, biases = data, self.tensor(f"{module}.scales", device), self.tensor(f"{module}.biases", device)
        stored = Stored(words, scales, biases) if group == GROUP_SIZE else None
        return Weight(lambda: dequantize(words, scales, biases, bits, group, dtype), bits, stored, dtype)

    def tensor(self, name: str, device: str = "cpu") -> Tensor:
        """A stored tensor as it is, on the device."""
        entry = self.entries.get(name)
        if entry is None:
            raise self._fail("", f"tensor {name} is missing; the download may be incomplete")
        if entry.dtype not in DTYPES:
            raise self._fail(entry.file.name, f"{name} has dtype {entry.dtype}; it cannot be read")
        return read_tensor(entry.file, entry.start, entry.dtype, entry.shape, device, self.meter)

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the files: name, sizes, sha256 of config, index, and the files that turn text into ids."""
        files = sorted({entry.file for entry in self.entries.values()})
        index = self.path / INDEX_NAME
        return {
            "name": self.name,
            "files": {file.name: file.stat().st_size for file in files},
            "config_sha256": _sha256(self.path / "config.json"),
            "index_sha256": _sha256(index) if index.is_file() else None,
            "text_sha256": self._text_sha256(),
        }

    def _text_sha256(self) -> str | None:
        """sha256 over tokenizer, chat template and stop ids; None for a folder without a tokenizer.

        A template that was revised upstream gives other prompts, so records of the two do not compare.
        """
        files = [self.path / name for name in TEXT_FILES]
        if not files[0].is_file():
            return None
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.name} {_sha256(file) if file.is_file() else None}\n".encode())
        return digest.hexdigest()

    def content_sha256(self) -> str:
        """sha256 over the tensors' files, in name order; reads every byte."""
        digest = hashlib.sha256()
        for file in sorted({entry.file for entry in self.entries.values()}):
            digest.update(_sha256(file).encode())
        return digest.hexdigest()

    def _bits_of(self, module: str) -> tuple[int, int] | None:
        return None if self.quantization is None else self.quantization.of(module)

    def _verify_tensor(self, name: str, shape: tuple[int, ...]) -> set[str]:
        """Check one tensor with its scales and biases; the names that it takes."""
        entry = self.entries.get(name)
        if entry is None:
            raise self._fail("", f"tensor {name} is missing; expected shape {list(shape)}, is the download complete?")
        module = name.removesuffix(".weight")
        scales, biases = f"{module}.scales", f"{module}.biases"
        spec = self._bits_of(module) if len(shape) == 2 else None
        if entry.dtype == "U32":
            if scales not in self.entries or biases not in self.entries:
                missing = scales if scales not in self.entries else biases
                raise self._fail(entry.file.name, f"{name} is packed, but {missing} is missing")
            if spec is None:
                raise self._fail(entry.file.name, f"{name} is packed, but config.json says that it is not quantized")
            return self._verify_packed(name, entry, shape, spec)
        if entry.dtype not in _FLOATS:
            raise self._fail(entry.file.name, f"{name} has dtype {entry.dtype}; expected one of {', '.join(_FLOATS)}")
        if spec is not None:
            raise self._fail(
                entry.file.name, f"{name} is {entry.dtype}, but config.json says {spec[0]}-bit; fix its quantization"
            )
        if entry.shape != shape:
            raise self._fail(
                entry.file.name,
                f"{name} has shape {list(entry.shape)}; the config implies {list(shape)}{_SIZED_BY.get(name, '')}",
            )
        return {name}

    def _verify_packed(self, name: str, entry: Entry, shape: tuple[int, ...], spec: tuple[int, int]) -> set[str]:
        rows, columns = shape
        bits, group = spec
        words = (rows, columns * bits // 32)
        if columns % group:
            raise self._fail(entry.file.name, f"{name}: {columns} columns are no multiple of group_size {group}")
        if entry.shape != words:
            scales = self.entries[f"{name.removesuffix('.weight')}.scales"].shape
            if len(scales) == 2 and scales[1] * group != columns:  # another width; taken for other bits otherwise
                raise self._fail(
                    entry.file.name,
                    f"{name} has shape {list(entry.shape)}, {scales[1] * group} inputs by its scales; the config "
                    f"implies {columns} inputs, so {list(words)}{_SIZED_BY.get(name, '')}",
                )
            stored = entry.shape[1] * 32 / columns if len(entry.shape) == 2 and entry.shape[0] == rows else None
            hint = f" ({stored:g} bits)" if stored else ""
            raise self._fail(
                entry.file.name,
                f"{name} has shape {list(entry.shape)}{hint}; config.json says {bits} bits, so {list(words)}",
            )
        module = name.removesuffix(".weight")
        for part in (f"{module}.scales", f"{module}.biases"):
            found = self.entries[part]
            if found.shape != (rows, columns // group) or found.dtype not in _FLOATS:
                raise self._fail(
                    found.file.name,
                    f"{part} is {found.dtype} {list(found.shape)}; expected floats {[rows, columns // group]}",
                )
        return {name, f"{module}.scales", f"{module}.biases"}

    def _fail(self, file: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.name}/{file}: {message}" if file else f"{self.name}: {message}")


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the config and the safetensors headers of a folder; CheckpointError for anything missing or broken."""
    if not path.is_dir():
        raise CheckpointError(f"{path.name}: no such checkpoint folder; check the path and $HARNESS_MODELS")
    config = _read_json(path / "config.json")
    entries: dict[str, Entry] = {}
    for file in _weight_files(path):
        for stored, (dtype, shape, start) in read_header(file).items():
            name = _normalise(stored)
            if name is None:
                continue
            if name in entries:
                raise CheckpointError(
                    f"{path.name}/{file.name}: {stored} is also in {entries[name].file.name}; remove one of them"
                )
            entries[name] = Entry(file, stored, dtype, shape, start)
    return Checkpoint(path, config, entries, _quantization(config, path.name))


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Name -> (dtype, shape, first byte) from a safetensors header, after checking it against the file's size."""
    place = where(file)
    try:
        return _read_header(file, place)
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be read ({error.strerror})") from error


def _read_header(file: Path, place: str) -> dict[str, tuple[str, tuple[int, ...], int]]:
    size = file.stat().st_size
    with file.open("rb") as handle:
        head = handle.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{place}: truncated or not safetensors ({size} bytes); fetch the file again")
        try:
            header = json.loads(handle.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{place}: the header is not JSON ({error}); fetch the file again") from error
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    end = 0
    try:
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = (int(offset) for offset in entry["data_offsets"])
                tensors[name] = (str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), 8 + length + first)
                end = max(end, last)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise CheckpointError(f"{place}: the header is malformed ({error!r}); fetch the file again") from error
    if 8 + length + end != size:
        raise CheckpointError(
            f"{place}: truncated: the header promises {8 + length + end} bytes, the file has {size}; fetch it again"
        )
    try:
        with safe_open(str(file), framework="pt"):
            return tensors
    except SafetensorError as error:
        raise CheckpointError(f"{place}: the header contradicts itself ({error}); fetch the file again") from error


def _weight_files(path: Path) -> list[Path]:
    """The files that hold tensors: those of the index, or every safetensors file of the folder."""
    index = path / INDEX_NAME
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path.name}: no .safetensors file; is the download complete?")
        return files
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path.name}/{INDEX_NAME}: no weight_map; fetch the file again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or "\0" in shard:
            raise CheckpointError(f"{path.name}/{INDEX_NAME}: {name} lies in {shard!r}, which is no file's name")
    files = [path / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if file.parent != path or not file.is_file():
            raise CheckpointError(f"{path.name}/{INDEX_NAME}: names the shard {file.name}, which is missing")
    for file in files:
        held = read_header(file)
        for name, shard in weight_map.items():
            if shard == file.name and name not in held:
                raise CheckpointError(f"{path.name}/{file.name}: {INDEX_NAME} puts {name} here, but it is not")
    return files


def _normalise(name: str) -> str | None:
    """A tensor's name without its outer prefix, or None for one that belongs to no text model."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    if name.startswith(_OTHER_TOWERS) or name.endswith(_UNREAD_SUFFIXES):
        return None
    return name


def _quantization(config: Mapping[str, Any], folder: str) -> Quantization | None:
    section = config.get("quantization", config.get("quantization_config"))
    if section is None:
        return None
    where = f"{folder}/config.json: quantization"
    if not isinstance(section, Mapping):
        raise CheckpointError(f"{where} must be an object, found {type(section).__name__}")
    if section.get("mode", "affine") != "affine":
        raise CheckpointError(f"{where}.mode {section['mode']!r} is not supported, only affine")
    bits, group = _bits(section, where, None)
    overrides: dict[str, tuple[int, int] | None] = {}
    for module, entry in section.items():
        name = _normalise(str(module))
        if name is None or not isinstance(entry, Mapping | bool):
            continue
        if isinstance(entry, Mapping):
            overrides[name] = _bits(entry, f"{where}.{module}", (bits, group))
        elif entry is False:
            overrides[name] = None
    return Quantization(bits, group, overrides)


def _bits(section: Mapping[str, Any], where: str, default: tuple[int, int] | None) -> tuple[int, int]:
    bits = section.get("bits", default and default[0])
    group = section.get("group_size", default and default[1])
    if bits not in (4, 8) or group not in (32, 64, 128):
        raise CheckpointError(f"{where}: bits {bits!r} and group_size {group!r}; supported: 4 or 8, and 32, 64 or 128")
    return int(bits), int(group)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise CheckpointError(f"{where(file)}: missing; a checkpoint folder holds config.json and .safetensors")
    return read_json_object(file)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
