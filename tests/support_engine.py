"""Random Gemma 4 pairs as real MLX-format checkpoints, and the engine loaded from them.

`random_pair_dirs` builds a pair once per test run and hands out its folders, `make_pair` loads it with the engine.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from support_geometry import NANO_SHAPED as NANO_SHAPED
from support_geometry import TINY as TINY
from support_geometry import TINY_31B as TINY_31B
from support_geometry import (
    Config,
    Tensors,
    drafter_config,
    drafter_shapes,
    random_weights,
    target_config,
    target_shapes,
)
from support_geometry import Geometry as Geometry

from engine.dispatch import DispatchPolicy
from engine.pair import Pair, load_pair
from engine.quantize import quantize
from tools.nano.tokens import tokenizer_files, train_tokenizer

GROUP_SIZE = 64
TARGET_PREFIX = "language_model."
MIXED_BITS: Mapping[str, int] = {"mlp": 8, "default": 4}


class PairDirs(NamedTuple):
    """Folders of the two checkpoints of a pair."""

    target: Path
    drafter: Path


def module_bits(name: str, bits: Mapping[str, int]) -> int:
    """Bits of a matrix: the value of the first key that occurs in its name, else that of "default"."""
    return next((value for key, value in bits.items() if key != "default" and key in name), bits["default"])


def quantize_tensors(weights: Mapping[str, torch.Tensor], bits: Mapping[str, int] | None) -> tuple[Tensors, Config]:
    """bf16 tensors as MLX stores them, matrices packed where `bits` is given, and the config's quantization block."""
    stored: Tensors = {}
    block: Config = {"group_size": GROUP_SIZE, "bits": bits["default"], "mode": "affine"} if bits else {}
    for name, value in weights.items():
        rounded = value.to(torch.bfloat16)
        if bits is None or value.ndim != 2:
            stored[name] = rounded
            continue
        module, width = name.removesuffix(".weight"), module_bits(name, bits)
        stored[name], stored[f"{module}.scales"], stored[f"{module}.biases"] = quantize(rounded, width, GROUP_SIZE)
        if width != bits["default"]:
            block[module] = {"group_size": GROUP_SIZE, "bits": width}
    return stored, block


def write_checkpoint(folder: Path, config: Config, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> None:
    """config.json, `shards` safetensors files of about the same number of tensors, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    names = sorted(tensors)
    files = [f"model-{index:05}-of-{shards:05}.safetensors" for index in range(1, shards + 1)]
    if shards == 1:
        files = ["model.safetensors"]
    weight_map: dict[str, str] = {}
    for index, file in enumerate(files):
        part = names[index * len(names) // shards : (index + 1) * len(names) // shards]
        save_file({name: tensors[name].contiguous() for name in part}, folder / file, metadata={"format": "mlx"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(file: Path, content: Any) -> None:
    """A JSON file as MLX's tools lay it out."""
    file.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")


def with_quantization(config: Config, block: Config) -> Config:
    """A config with its quantization block under both of the names that MLX writes; unchanged for an empty block."""
    return {**config, "quantization": block, "quantization_config": block} if block else config


@functools.cache
def small_tokenizer_files(vocab_size: int) -> dict[str, str]:
    """A byte-level BPE learned from this module's own text, with Gemma's special tokens at their ids: name -> text."""
    return tokenizer_files(train_tokenizer([Path(__file__).read_text(encoding="utf-8")], vocab_size))


def write_random_pair(
    folder: Path,
    seed: int = 0,
    geometry: Geometry = TINY,
    target_bits: Mapping[str, int] | None = MIXED_BITS,
    drafter_bits: int | None = 4,
) -> PairDirs:
    """A target and its drafter under `folder`, MLX format; bits None writes plain bf16 matrices.

    `target_bits` maps a part of module names to bits, with "default" for the rest: {"mlp": 8, "default": 4}.
    """
    dirs = PairDirs(folder / f"{geometry.name}-it", folder / f"{geometry.name}-it-assistant")
    weights = {f"{TARGET_PREFIX}{name}": w for name, w in random_weights(target_shapes(geometry), seed).items()}
    tensors, block = quantize_tensors(weights, target_bits)
    write_checkpoint(dirs.target, with_quantization(target_config(geometry), block), tensors, shards=3)
    for name, text in small_tokenizer_files(geometry.vocab_size).items():
        (dirs.target / name).write_text(text, encoding="utf-8")

    uniform = None if drafter_bits is None else {"default": drafter_bits}
    tensors, block = quantize_tensors(random_weights(drafter_shapes(geometry), seed + 1), uniform)
    write_checkpoint(dirs.drafter, with_quantization(drafter_config(geometry), block), tensors)
    return dirs


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread: models this small gain nothing from a second one, and lose much where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@functools.cache
def scratch_folder() -> Path:
    """A folder for what is built once per test run; removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="random-pairs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _built_pair(
    seed: int, geometry: Geometry, target_bits: tuple[tuple[str, int], ...] | None, drafter_bits: int | None
) -> PairDirs:
    folder = Path(tempfile.mkdtemp(prefix=f"{geometry.name}-{seed}-", dir=scratch_folder()))
    return write_random_pair(folder, seed, geometry, None if target_bits is None else dict(target_bits), drafter_bits)


def random_pair_dirs(
    seed: int = 0,
    geometry: Geometry = TINY,
    target_bits: Mapping[str, int] | None = MIXED_BITS,
    drafter_bits: int | None = 4,
) -> PairDirs:
    """The folders of a random pair, written on first use and shared from then on: read them, never change them."""
    return _built_pair(seed, geometry, None if target_bits is None else tuple(target_bits.items()), drafter_bits)


def make_pair(
    geometry: Geometry = TINY,
    seed: int = 0,
    *,
    target_bits: Mapping[str, int] | None = MIXED_BITS,
    drafter_bits: int | None = 4,
    policy: DispatchPolicy | None = None,
    stage: str = "rowwise",
    dtype: torch.dtype = torch.bfloat16,
) -> Pair:
    """A random pair loaded by the engine, with `policy`, or the default one at `stage`."""
    dirs = random_pair_dirs(seed, geometry, target_bits, drafter_bits)
    return load_pair(dirs.target, dirs.drafter, policy or DispatchPolicy(stage=stage), dtype=dtype)


def copy_of(checkpoint: Path, folder: Path) -> Path:
    """A copy of a checkpoint under `folder`, to be spoiled."""
    return Path(shutil.copytree(checkpoint, folder / checkpoint.name))


def read_config(checkpoint: Path) -> Config:
    """The parsed config.json."""
    content: Config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return content


def edit_config(checkpoint: Path, change: Callable[[Config], Any]) -> None:
    """Apply `change` to the parsed config.json and write it back; "quantization_config" follows "quantization"."""
    config = read_config(checkpoint)
    change(config)
    if "quantization" in config:
        config["quantization_config"] = config["quantization"]
    write_json(checkpoint / "config.json", config)


def weight_files(checkpoint: Path) -> list[Path]:
    """The safetensors files, in order."""
    return sorted(checkpoint.glob("*.safetensors"))


def read_tensors(checkpoint: Path) -> Tensors:
    """All tensors as stored."""
    return {name: tensor for file in weight_files(checkpoint) for name, tensor in load_file(file).items()}


def generated(model: Any, prompt: Sequence[int], count: int, **options: Any) -> tuple[int, ...]:
    """The ids that a transformers model appends greedily, no stop token."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
    return tuple(out[0, len(prompt) :].tolist())
