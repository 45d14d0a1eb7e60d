"""Grows the nano pair: checks that it fits, plans every tensor, writes the two folders.

A folder appears under its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import TargetConfig, TextConfig, parse_drafter_config, parse_target_config
from engine.errors import ConfigError
from engine.quantize import GROUP_SIZE
from engine.weights import drafter_tensors, target_tensors
from tools.grow.build import Module
from tools.grow.errors import GrowError
from tools.grow.geometry import PERIOD, TARGET_PREFIX, Geometry, make_config
from tools.grow.maps import head_map, stretch
from tools.grow.recipe import Make, Plan, drafter_recipes, target_recipes
from tools.grow.source import Nano, open_nano
from tools.grow.write import SHARD_BYTES, write_json, write_weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SPARE_BYTES = 256 << 20
NOTICE = "Grown from nano, not Google's weights."
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints, planned: config.json and modules."""

    name: str
    role: str
    config: dict[str, Any]
    modules: list[Module]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(part.nbytes for module in self.modules for part in module.parts)


def embedding_factor(nano: TextConfig, grown: TextConfig, dtype: torch.dtype) -> float:
    """Nano's embedding scale over the grown one's, each rounded to the dtype that the model computes in."""
    small, large = (torch.tensor(math.sqrt(config.hidden_size), dtype=dtype).float().item() for config in (nano, grown))
    return small / large


def plan_pair(geometry: Geometry, nano: Nano, seed: int, floats: bool = False) -> tuple[Side, Side]:
    """Target and drafter as plans; `floats` leaves both in fp32, for tests, with nothing rounded."""
    dtype = torch.float32 if floats else torch.bfloat16
    origin = {"pair": NOTICE, "nano_sha256": nano.sha256, "geometry": geometry.name, "seed": seed}
    name = "float32" if floats else None
    target_json = make_config(geometry, "target", nano.target.checkpoint.config, origin, name)
    drafter_json = make_config(geometry, "drafter", nano.drafter.checkpoint.config, origin, name)
    try:
        target, drafter = parse_target_config(target_json), parse_drafter_config(drafter_json)
    except ConfigError as error:
        raise GrowError(f"geometry {geometry.name}: {error}") from error
    _check_fits(geometry, nano.target_config, target, PERIOD)
    _check_fits(geometry, nano.drafter_config, drafter, nano.drafter_config.num_hidden_layers)
    factor = embedding_factor(nano.target_config, target, dtype)
    plan = Plan(nano.target, nano.target_config, target, geometry.target, factor)
    if plan.stream.copies * nano.target_config.hidden_size > target.hidden_size:
        raise GrowError(f"geometry {geometry.name}: hidden size {target.hidden_size} has no room for two copies")
    draft = Plan(nano.drafter, nano.drafter_config, drafter, geometry.drafter, factor)

    def module(role: str, name: str, shape: tuple[int, ...], make: Make) -> Module:
        inside = "" if name.startswith(("pre_projection", "post_projection")) else "model."
        prefix = TARGET_PREFIX + inside if role == "target" else inside
        matrix = len(shape) == 2 and not floats
        bits = geometry.side(role).module_bits(name) if matrix else None
        return Module(f"{role}/{name}", prefix + name, shape, bits, dtype, make, seed)

    sides = []
    for role, config, shapes, recipes in (
        ("target", target_json, target_tensors(target), target_recipes(plan)),
        ("drafter", drafter_json, drafter_tensors(drafter), drafter_recipes(draft, plan.stream)),
    ):
        modules = [module(role, tensor, shapes.pop(tensor), make) for tensor, make in recipes]
        if shapes:
            raise GrowError(f"no recipe for {', '.join(shapes)}")
        sides.append(Side(geometry.folders[role != "target"], role, config, modules))
    return sides[0], sides[1]


def grow_pair(
    geometry: Geometry,
    nano_folder: Path,
    out: Path,
    *,
    seed: int = 0,
    device: str = "cpu",
    floats: bool = False,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> tuple[Path, Path]:
    """Write the grown pair below `out`; returns the target's and the drafter's folder. GrowError in one line."""
    nano = open_nano(nano_folder, device)
    sides = plan_pair(geometry, nano, seed, floats)
    folders = tuple(out / side.name for side in sides)
    for folder in folders:
        if folder.exists():
            raise GrowError(f"{folder.name} is already there; remove it or give another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        _check_space(out, sum(side.nbytes for side in sides))
        for side, folder, source in zip(sides, folders, (nano.target, nano.drafter), strict=True):
            with _partial(folder) as partial:
                write_weights(partial, side.modules, device, _counter(side, progress), shard_bytes)
                write_json(partial / "config.json", side.config)
                names = ("generation_config.json", *(TOKENIZER_FILES if side.role == "target" else ()))
                for name in names:
                    shutil.copyfile(source.checkpoint.path / name, partial / name)
                (partial / "README.md").write_text(_card(side, geometry, seed), encoding="utf-8")
    except OSError as error:
        raise GrowError(f"cannot write under {out.name}: {error.strerror or error}") from error
    except torch.OutOfMemoryError as error:
        raise GrowError(f"out of memory on {device}; free some or use --device cpu") from error
    return folders[0], folders[1]


@contextlib.contextmanager
def _partial(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name once it is whole and goes away otherwise."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_fits(geometry: Geometry, nano: TextConfig, grown: TextConfig, period: int) -> None:
    """GrowError where nano's sizes have no place in the geometry."""
    where = f"geometry {geometry.name}"
    for kind in ("sliding", "full"):
        head_map(nano.layer_shape(kind), grown.layer_shape(kind))
        stretch(nano.layer_shape(kind), grown.layer_shape(kind))
        if nano.layer_shape(kind).head_dim % GROUP_SIZE:
            raise GrowError(f"nano's {kind} head_dim {nano.layer_shape(kind).head_dim} is no multiple of {GROUP_SIZE}")
    widths: tuple[tuple[str, int, int], ...] = (
        ("hidden_size", nano.hidden_size, grown.hidden_size),
        ("intermediate_size", nano.intermediate_size, grown.intermediate_size),
        ("num_hidden_layers", nano.num_hidden_layers, grown.num_hidden_layers),
    )
    for name, small, large in widths:
        if small > large:
            raise GrowError(f"{where}: {name} {large} is less than nano's {small}; use a larger geometry")
    if grown.vocab_size % nano.vocab_size:
        raise GrowError(f"{where}: vocabulary {grown.vocab_size} is no multiple of nano's {nano.vocab_size}")
    if nano.num_hidden_layers % period or grown.num_hidden_layers % period:
        raise GrowError(f"{where}: {nano.num_hidden_layers} and {grown.num_hidden_layers} layers, groups of {period}")
    same = nano.layer_types[:period] == grown.layer_types[:period], nano.attention_k_eq_v == grown.attention_k_eq_v
    if not all(same):
        raise GrowError(f"{where}: layer kinds or attention_k_eq_v differ from nano's")


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if free < needed + SPARE_BYTES:
        raise GrowError(
            f"not enough disk under {out.name}: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free; free some space"
        )


def _counter(side: Side, progress: Progress | None) -> Callable[[int], None]:
    """Adds up bytes from all writing threads."""
    lock, done, total = threading.Lock(), [0], side.nbytes

    def add(count: int) -> None:
        with lock:
            done[0] += count
            if progress is not None:
                progress(side.role, done[0], total)

    return add


def _card(side: Side, geometry: Geometry, seed: int) -> str:
    return f"""# {side.name}

{NOTICE} The function of the nano pair (`specs/checkpoints`) in {geometry.name} geometry: text and acceptance are
nano's, shapes and cost are the real model's. Layers that nano does not fill are random and hardly touch the text.

Built by `tools/grow_pair.py --geometry {geometry.name} --seed {seed}`; never part of a repository.
"""


__all__ = ["NOTICE", "GrowError", "Nano", "Side", "TargetConfig", "embedding_factor", "grow_pair", "plan_pair"]
