"""Write a Qwen 3.5 pair of random weights in the real 4B's shapes, from a seed, in seconds.

    python tools/seed_qwen35_pair.py --out $HARNESS_MODELS

Costs, bytes and decisions are those of the shapes; the text means nothing and no draft is accepted. The tokenizer is
the nano pair's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.qwen35.config import parse_drafter_config, parse_target_config
from engine.qwen35.weights import drafter_tensors, target_tensors
from tools.qwen35.shape import BITS, GROUP, QwenNano

NANO = Path(__file__).resolve().parents[1] / "specs" / "checkpoints" / "qwen35-nano-4bit"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
NAME = "qwen35-4b-seeded"
CODE_SPREAD = 4.61
"""Standard deviation of a uniform 4-bit code."""

REAL = QwenNano(
    vocab_size=248320,
    hidden_size=2560,
    intermediate_size=9216,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    drafter_layers=5,
    drafter_heads=32,
    drafter_kv_heads=8,
    drafter_head_dim=128,
    mask_token_id=248070,
    taps=(1, 8, 15, 22, 29),
)


def main() -> int:
    """Write both folders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the two checkpoint folders")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for folder in write_pair(args.out, REAL, args.seed):
        print(folder.name)
    return 0


def write_pair(out: Path, shape: QwenNano, seed: int, name: str = NAME) -> tuple[Path, Path]:
    """The folders of a target in MLX's 4-bit form and of a bf16 drafter."""
    target, drafter = out / name, out / f"{name}-dflash"
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for key, size in sorted(target_tensors(parse_target_config(shape.target_config()), "mlx").items()):
        stored = f"language_model.model.{key}"
        if len(size) == 2:
            tensors |= _packed(stored, size, 1.5 if key.startswith("embed") else 1.0, generator)
        else:
            tensors[stored] = _vector(key, size, generator).bfloat16()
    seeded = {"seeded_from": {"seed": seed}}
    _write(target, shape.target_config() | seeded, tensors)
    for file in TEXT_FILES:
        shutil.copy(NANO / file, target / file)
    draft_shapes = drafter_tensors(parse_drafter_config(shape.drafter_config()))
    draft = {
        key: (_vector(key, size, generator) if len(size) == 1 else _noise(size, generator) / size[-1] ** 0.5).bfloat16()
        for key, size in sorted(draft_shapes.items())
    }
    _write(drafter, shape.drafter_config() | seeded, draft)
    return target, drafter


def _packed(name: str, size: tuple[int, ...], gain: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Uniform 4-bit codes whose values spread like gain / sqrt(K)."""
    rows, columns = size
    module = name.removesuffix(".weight")
    words = torch.randint(-(2**31), 2**31, (rows, columns * BITS // 32), generator=generator, dtype=torch.int64)
    scale = torch.full((rows, columns // GROUP), gain / CODE_SPREAD / columns**0.5).bfloat16()
    return {
        name: words.to(torch.int32).view(torch.uint32),
        f"{module}.scales": scale,
        f"{module}.biases": (scale.float() * -7.5).bfloat16(),
    }


def _vector(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norms near 1, convolutions, and decays between about 0.8 and 0.9 a token."""
    noise = _noise(size, generator)
    if name.endswith("A_log"):
        return noise.abs() * 0.5 - 2.0
    if name.endswith("dt_bias"):
        return 0.3 * noise
    return 0.5 * noise if len(size) == 3 else 1.0 + 0.1 * noise


def _noise(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator)


def _write(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})


if __name__ == "__main__":
    sys.exit(main())
