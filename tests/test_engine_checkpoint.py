"""Checkpoints that are broken in the ways users' files are: each gives one line with file, tensor, expected and found.

Every case spoils a copy of a random pair that loads; `test_untouched_copy_loads` holds that half of the claim.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import support_broken as broken
import support_engine as build
import torch
from support_broken import GATE, QUERY
from support_engine import PairDirs, one_thread

from engine.dispatch import DispatchPolicy
from engine.errors import CheckpointError, ConfigError, EngineError
from engine.pair import Pair, load_pair

FIRST, SECOND, THIRD = (f"model-0000{shard}-of-00003.safetensors" for shard in (1, 2, 3))


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def load(dirs: PairDirs, drafter: bool = True) -> Pair:
    """Load a pair in bf16 on the CPU."""
    return load_pair(dirs.target, dirs.drafter if drafter else None, DispatchPolicy())


def test_untouched_copy_loads(tmp_path: Path) -> None:
    """Guards all cases below: what they spoil must be the only thing wrong."""
    pair = load(broken.copy_pair(tmp_path))
    assert pair.drafter is not None
    caches = pair.target.new_caches()
    hidden = pair.target.prefill([2, 9, 40], caches)
    assert torch.isfinite(pair.target.logits(hidden[None]).float()).all()


# -- one spoiled checkpoint each ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """How the target (or, with `drafter`, the drafter) is spoiled, and what the error must say."""

    id: str
    spoil: Callable[[Path], Any]
    error: type[EngineError]
    says: tuple[str, ...]
    drafter: bool = False


BAD = [
    Bad("truncated shard", broken.cut_shard, CheckpointError, (SECOND, "truncated", "bytes")),
    Bad("truncated header", broken.cut_header, CheckpointError, (FIRST, "truncated")),
    Bad("empty shard", broken.empty_shard, CheckpointError, (THIRD, "0 bytes")),
    Bad("web page", broken.page_instead_of_weights, CheckpointError, (FIRST, "safetensors")),
    Bad("lfs pointer", broken.pointer_instead_of_weights, CheckpointError, (FIRST,)),
    Bad(
        "overlapping offsets",
        broken.overlapping_offsets,
        CheckpointError,
        (FIRST, "header"),
    ),
    Bad("negative offset", broken.negative_offset, CheckpointError, (FIRST, "header")),
    Bad(
        "metadata of no kind",
        broken.metadata_of_no_kind,
        CheckpointError,
        (FIRST, "header"),
    ),
    Bad("unknown dtype", broken.unknown_dtype, CheckpointError, (FIRST, "F99")),
    Bad(
        "header without shape",
        broken.header_without_shape,
        CheckpointError,
        (FIRST, "header"),
    ),
    Bad("broken tokenizer", broken.broken_tokenizer, CheckpointError, ("tiny-it/tokenizer.json",)),
    Bad("missing shard", broken.lose_shard, CheckpointError, ("index.json", "model-00003-of-00003", "missing")),
    Bad("tensor elsewhere", broken.move_entry, CheckpointError, (THIRD, f"{GATE}.scales")),
    Bad("tensor twice", broken.double_tensor, CheckpointError, ("q_proj.weight", "model-old.safetensors")),
    Bad("cut config", broken.half_a_config, CheckpointError, ("config.json", "JSON")),
    Bad("list as config", broken.list_as_config, CheckpointError, ("config.json", "object", "list")),
    Bad(
        "no scales",
        lambda folder: broken.drop_tensor(folder, f"{GATE}.scales"),
        CheckpointError,
        ("layers.0.mlp.gate_proj.scales", "missing", "packed"),
    ),
    Bad(
        "no biases",
        lambda folder: broken.drop_tensor(folder, f"{QUERY}.biases"),
        CheckpointError,
        ("layers.0.self_attn.q_proj.biases", "missing"),
    ),
    Bad(
        "no norm",
        lambda folder: broken.drop_tensor(folder, "language_model.model.layers.5.post_feedforward_layernorm.weight"),
        CheckpointError,
        ("layers.5.post_feedforward_layernorm.weight", "missing", "[128]"),
    ),
    Bad(
        "no layer scalar",
        lambda folder: broken.drop_tensor(folder, "language_model.model.layers.2.layer_scalar"),
        CheckpointError,
        ("layers.2.layer_scalar", "missing"),
    ),
    Bad(
        "no v_proj in a sliding layer",
        lambda folder: broken.edit_tensors(
            folder,
            lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.3.self_attn.v_proj" in name],
        ),
        CheckpointError,
        ("layers.3.self_attn.v_proj.weight", "missing"),
    ),
    Bad("unknown tensor", broken.extra_tensor, CheckpointError, ("q_proj.lora_a", "target")),
    Bad(
        "4-bit module called 8-bit",
        lambda folder: broken.claim_bits(folder, 8, QUERY),
        CheckpointError,
        ("layers.0.self_attn.q_proj.weight", "[128, 16]", "4 bits", "8 bits", "[128, 32]"),
    ),
    Bad(
        "8-bit module called 4-bit",
        lambda folder: broken.claim_bits(folder, 4, GATE),
        CheckpointError,
        ("layers.0.mlp.gate_proj.weight", "[192, 32]", "8 bits", "4 bits", "[192, 16]"),
    ),
    Bad("default bits wrong", lambda folder: broken.claim_bits(folder, 8), CheckpointError, ("4 bits", "8 bits")),
    Bad("bits unknown", lambda folder: broken.claim_bits(folder, 3), CheckpointError, ("config.json", "3", "4 or 8")),
    Bad(
        "group size wrong",
        lambda folder: build.edit_config(folder, lambda config: config["quantization"].update(group_size=32)),
        CheckpointError,
        ("embed_tokens.scales", "[512, 2]", "[512, 4]"),
    ),
    Bad(
        "heads wrong",
        lambda folder: broken.edit_text_config(folder, num_attention_heads=8),
        CheckpointError,
        ("q_proj.weight", "[128, 16]", "[256, 16]"),
    ),
    Bad(
        "v_proj denied",
        lambda folder: broken.edit_text_config(folder, attention_k_eq_v=False),
        CheckpointError,
        ("layers.5.self_attn.k_proj.weight", "[64, 16]", "[128, 16]"),
    ),
    Bad(
        "mode unknown",
        lambda folder: build.edit_config(folder, lambda config: config["quantization"].update(mode="mxfp4")),
        CheckpointError,
        ("config.json", "mxfp4", "affine"),
    ),
    Bad("floats called quantized", broken.unpack_weights, CheckpointError, ("weight", "BF16", "4-bit")),
    Bad("packed called float", broken.forget_quantization, CheckpointError, ("weight", "packed", "not quantized")),
    Bad(
        "module called float",
        lambda folder: build.edit_config(folder, lambda config: config["quantization"].update({GATE: False})),
        CheckpointError,
        ("layers.0.mlp.gate_proj.weight", "packed", "not quantized"),
    ),
    Bad(
        "scales of another group",
        broken.replace_tensor(f"{GATE}.scales", lambda scales: scales.repeat(1, 2)),
        CheckpointError,
        ("layers.0.mlp.gate_proj.scales", "[192, 4]", "[192, 2]"),
    ),
    Bad(
        "matrix cut short",
        broken.replace_tensor(f"{QUERY}.weight", lambda packed: packed[:-1]),
        CheckpointError,
        ("layers.0.self_attn.q_proj.weight", "[127, 16]", "[128, 16]"),
    ),
    Bad(
        "norm of another width",
        broken.replace_tensor("language_model.model.norm.weight", lambda norm: norm[:100]),
        CheckpointError,
        ("norm.weight", "[100]", "[128]"),
    ),
    Bad(
        "integers as a norm",
        broken.replace_tensor("language_model.model.norm.weight", lambda norm: norm.to(torch.int32)),
        CheckpointError,
        ("norm.weight", "I32"),
    ),
    Bad(
        "config of another width",
        lambda folder: broken.edit_text_config(folder, hidden_size=192),
        CheckpointError,
        ("embed_tokens.weight", "[512, 16]", "[512, 24]"),
    ),
    Bad(
        "unknown model type",
        lambda folder: broken.rename_model_type(folder, "gemma9"),
        ConfigError,
        ("config.json", "gemma9", "gemma4_unified"),
    ),
    Bad(
        "no model type",
        lambda folder: build.edit_config(folder, lambda config: config.pop("model_type")),
        ConfigError,
        ("config.json", "model_type"),
    ),
    Bad("no head_dim", lambda folder: broken.drop_text_field(folder, "head_dim"), ConfigError, ("head_dim", "missing")),
    Bad(
        "no global_head_dim",
        lambda folder: broken.drop_text_field(folder, "global_head_dim"),
        ConfigError,
        ("global_head_dim", "missing"),
    ),
    Bad(
        "too few layer types",
        lambda folder: broken.edit_text_config(folder, num_hidden_layers=7),
        ConfigError,
        ("layer_types", "6", "7"),
    ),
    Bad(
        "unknown layer type",
        lambda folder: build.edit_config(
            folder, lambda config: config["text_config"]["layer_types"].__setitem__(2, "linear_attention")
        ),
        ConfigError,
        ("layer 2", "linear_attention"),
    ),
    Bad(
        "layer types against pattern",
        lambda folder: broken.edit_text_config(folder, sliding_window_pattern=3),
        ConfigError,
        ("layer 2", "sliding_attention", "sliding_window_pattern 3"),
    ),
    Bad(
        "overrides against each other",
        lambda folder: broken.edit_text_config(
            folder, per_layer_config={"5": {"head_dim": 32, "num_key_value_heads": 1}}
        ),
        ConfigError,
        ("layer 5", "32", "64"),
    ),
    Bad(
        "sliding layer called full",
        lambda folder: build.edit_config(
            folder, lambda config: config["text_config"]["layer_types"].__setitem__(1, "full_attention")
        ),
        CheckpointError,
        ("layers.1.self_attn", "[128, 16]", "[256, 16]"),
    ),
    Bad(
        "experts",
        lambda folder: broken.edit_text_config(folder, enable_moe_block=True),
        ConfigError,
        ("not supported", "mixture of experts"),
    ),
    Bad(
        "per-layer embeddings",
        lambda folder: broken.edit_text_config(folder, hidden_size_per_layer_input=64),
        ConfigError,
        ("not supported", "hidden_size_per_layer_input"),
    ),
    Bad(
        "drafter: truncated",
        lambda folder: broken.truncate_file(folder / "model.safetensors", 0.9),
        CheckpointError,
        ("tiny-it-assistant/model.safetensors", "truncated"),
        drafter=True,
    ),
    Bad(
        "drafter: no projection",
        lambda folder: broken.edit_tensors(
            folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("pre_projection")]
        ),
        CheckpointError,
        ("pre_projection.weight", "missing"),
        drafter=True,
    ),
    Bad(
        "drafter: 8-bit claimed",
        lambda folder: broken.claim_bits(folder, 8),
        CheckpointError,
        ("tiny-it-assistant", "4 bits", "8 bits"),
        drafter=True,
    ),
    Bad(
        "drafter: centroid head",
        lambda folder: build.edit_config(folder, lambda config: config.update(use_ordered_embeddings=True)),
        ConfigError,
        ("not supported", "use_ordered_embeddings"),
        drafter=True,
    ),
    Bad(
        "drafter: centroid tensors without the key",
        lambda folder: broken.edit_tensors(
            folder,
            lambda tensors: tensors.update(
                {"masked_embedding.centroids.weight": torch.ones(8, 64, dtype=torch.bfloat16)}
            ),
        ),
        CheckpointError,
        ("masked_embedding.centroids.weight", "drafter"),
        drafter=True,
    ),
    Bad(
        "drafter: no backbone width",
        lambda folder: build.edit_config(folder, lambda config: config.pop("backbone_hidden_size")),
        ConfigError,
        ("backbone_hidden_size", "missing"),
        drafter=True,
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id.replace(" ", "-"))
def test_broken_checkpoint_is_named(tmp_path: Path, bad: Bad) -> None:
    """Guards against a traceback, or worse a model that loads and is wrong: the line says where and what."""
    dirs = broken.copy_pair(tmp_path)
    bad.spoil(dirs.drafter if bad.drafter else dirs.target)
    with pytest.raises(EngineError) as caught:
        load(dirs)
    assert type(caught.value) is bad.error, repr(caught.value)
    broken.assert_one_line(caught.value, *bad.says)


def test_missing_folder(tmp_path: Path) -> None:
    """Guards the most common mistake: a checkpoint that was never downloaded."""
    dirs = broken.copy_pair(tmp_path)
    shutil.rmtree(dirs.drafter)
    with pytest.raises(CheckpointError) as caught:
        load(dirs)
    broken.assert_one_line(caught.value, "tiny-it-assistant", "no such checkpoint folder")


@pytest.mark.parametrize("file", ["config.json", "*.safetensors"])
def test_folder_without_a_file(tmp_path: Path, file: str) -> None:
    """Guards half a download: the config without weights, weights without the config."""
    dirs = broken.copy_pair(tmp_path)
    for path in dirs.target.glob(file):
        path.unlink()
    with pytest.raises(CheckpointError) as caught:
        load(dirs)
    broken.assert_one_line(caught.value, "tiny-it", "missing")


def test_folder_without_weights_and_index(tmp_path: Path) -> None:
    """Guards the index-less case: no tensors at all is an error of its own, not a missing embedding."""
    dirs = broken.copy_pair(tmp_path)
    for path in (*build.weight_files(dirs.target), dirs.target / "model.safetensors.index.json"):
        path.unlink()
    with pytest.raises(CheckpointError) as caught:
        load(dirs)
    broken.assert_one_line(caught.value, "tiny-it", ".safetensors")
