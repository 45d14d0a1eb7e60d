"""Ways in which users' checkpoints are broken; each function changes the folder that it is given.

Work on a `copy_of` a pair: the shared folders are for reading only.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support_engine import (
    GROUP_SIZE,
    PairDirs,
    copy_of,
    edit_config,
    random_pair_dirs,
    read_config,
    read_tensors,
    weight_files,
    write_checkpoint,
    write_json,
)
from support_geometry import Config, Tensors

from engine.quantize import dequantize

GATE = "language_model.model.layers.0.mlp.gate_proj"
QUERY = "language_model.model.layers.0.self_attn.q_proj"


def copy_pair(folder: Path) -> PairDirs:
    """A copy of the tiny pair under `folder`, which may be spoiled."""
    source = random_pair_dirs()
    return PairDirs(copy_of(source.target, folder), copy_of(source.drafter, folder))


def assert_one_line(error: BaseException, *parts: str) -> None:
    """The message is one line without a path of this machine, and names every part."""
    message = str(error)
    assert "\n" not in message
    assert tempfile.gettempdir() not in message
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


def edit_text_config(checkpoint: Path, **values: Any) -> None:
    """Set fields of text_config."""
    edit_config(checkpoint, lambda config: config["text_config"].update(values))


def drop_text_field(checkpoint: Path, key: str) -> None:
    """Remove a field of text_config."""
    edit_config(checkpoint, lambda config: config["text_config"].pop(key))


def rename_model_type(checkpoint: Path, model_type: str) -> None:
    """Claim to be another model."""
    edit_config(checkpoint, lambda config: config.update(model_type=model_type))


def claim_bits(checkpoint: Path, bits: int, module: str | None = None) -> None:
    """Let config.json state other bits, for one module (stored name, no `.weight`) or as the default."""

    def change(config: Config) -> None:
        if module is None:
            config["quantization"]["bits"] = bits
        else:
            config["quantization"][module] = {"group_size": GROUP_SIZE, "bits": bits}

    edit_config(checkpoint, change)


def edit_tensors(checkpoint: Path, change: Callable[[Tensors], Any]) -> None:
    """Apply `change` to the dict of stored tensors and write shards and index anew."""
    files, tensors = weight_files(checkpoint), read_tensors(checkpoint)
    change(tensors)
    for file in files:
        file.unlink()
    write_checkpoint(checkpoint, read_config(checkpoint), tensors, shards=len(files))


def drop_tensor(checkpoint: Path, name: str) -> None:
    """Leave one stored tensor out, of the file and of the index."""
    edit_tensors(checkpoint, lambda tensors: tensors.pop(name))


def truncate_file(file: Path, keep: float = 0.5) -> None:
    """Cut a file to a share of its bytes, as an interrupted download does."""
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])


def lose_shard(checkpoint: Path) -> Path:
    """Delete the last shard that the index names; returns its path."""
    file = weight_files(checkpoint)[-1]
    file.unlink()
    return file


def unpack_weights(checkpoint: Path) -> None:
    """Store float matrices while config.json still says quantized."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".scales")]:
            module = name.removesuffix(".scales")
            packed, scales, biases = tensors[f"{module}.weight"], tensors.pop(name), tensors.pop(f"{module}.biases")
            bits = 32 * packed.shape[1] // (scales.shape[1] * GROUP_SIZE)
            tensors[f"{module}.weight"] = dequantize(packed, scales, biases, bits, GROUP_SIZE)

    edit_tensors(checkpoint, change)


def forget_quantization(checkpoint: Path) -> None:
    """Drop the quantization blocks of config.json while the matrices stay packed."""

    def change(config: Config) -> None:
        del config["quantization"], config["quantization_config"]

    edit_config(checkpoint, change)


def cut_shard(checkpoint: Path) -> None:
    truncate_file(weight_files(checkpoint)[1], 0.6)


def cut_header(checkpoint: Path) -> None:
    file = weight_files(checkpoint)[0]
    file.write_bytes(file.read_bytes()[:100])


def empty_shard(checkpoint: Path) -> None:
    weight_files(checkpoint)[2].write_bytes(b"")


def page_instead_of_weights(checkpoint: Path) -> None:
    weight_files(checkpoint)[0].write_text("<!DOCTYPE html><html>Access denied</html>" * 20)


def pointer_instead_of_weights(checkpoint: Path) -> None:
    weight_files(checkpoint)[0].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")


def half_a_config(checkpoint: Path) -> None:
    truncate_file(checkpoint / "config.json")


def list_as_config(checkpoint: Path) -> None:
    write_json(checkpoint / "config.json", [1, 2])


def move_entry(checkpoint: Path) -> None:
    """The index puts a tensor into a shard that does not hold it."""
    file = checkpoint / "model.safetensors.index.json"
    content = json.loads(file.read_text())
    last = weight_files(checkpoint)[-1].name
    content["weight_map"][f"{GATE}.scales"] = last
    write_json(file, content)


def double_tensor(checkpoint: Path) -> None:
    """A leftover shard repeats a tensor, and there is no index to leave it out."""
    (checkpoint / "model.safetensors.index.json").unlink()
    name = f"{QUERY}.weight"
    save_file({name: read_tensors(checkpoint)[name]}, checkpoint / "model-old.safetensors")


def edit_header(checkpoint: Path, change: Callable[[list[Any], dict[str, Any]], Any]) -> None:
    """Rewrite the first shard's header; `change` gets the entries in order and the whole header."""
    file = weight_files(checkpoint)[0]
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change([entry for name, entry in header.items() if name != "__metadata__"], header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def overlapping_offsets(checkpoint: Path) -> None:
    edit_header(checkpoint, lambda entries, header: entries[0].update(data_offsets=entries[1]["data_offsets"]))


def negative_offset(checkpoint: Path) -> None:
    edit_header(checkpoint, lambda entries, header: entries[0]["data_offsets"].__setitem__(0, -4))


def metadata_of_no_kind(checkpoint: Path) -> None:
    edit_header(checkpoint, lambda entries, header: header.update(__metadata__=3))


def unknown_dtype(checkpoint: Path) -> None:
    edit_header(checkpoint, lambda entries, header: entries[0].update(dtype="F99"))


def header_without_shape(checkpoint: Path) -> None:
    edit_header(checkpoint, lambda entries, header: entries[0].pop("shape"))


def broken_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("{}")


def replace_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def spoil(checkpoint: Path) -> None:
        edit_tensors(checkpoint, lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))

    return spoil


def extra_tensor(checkpoint: Path) -> None:
    name = "language_model.model.layers.0.self_attn.q_proj.lora_a"
    edit_tensors(checkpoint, lambda tensors: tensors.update({name: torch.ones(4, 128, dtype=torch.bfloat16)}))
