"""Which folders make a pair, and what an opened checkpoint says about itself.

A drafter in the target's place, or made for another target, is one line with both numbers and their config keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import support_broken as broken
import support_engine as build
import torch
from support_engine import TINY, TINY_31B, PairDirs, one_thread
from support_geometry import drafter_for_another, random_weights, target_config, target_shapes

from engine.checkpoint import open_checkpoint
from engine.config import parse_target_config
from engine.dispatch import DispatchPolicy
from engine.errors import ConfigError, EngineError, PairError
from engine.pair import Pair, load_pair
from engine.quantize import dequantize, quantize


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def load(dirs: PairDirs, drafter: bool = True) -> Pair:
    """Load a pair in bf16 on the CPU."""
    return load_pair(dirs.target, dirs.drafter if drafter else None, DispatchPolicy())


def test_drafter_given_as_target() -> None:
    """Guards against mixed-up folders: a drafter in the target's place is told by name, not by a KeyError."""
    dirs = build.random_pair_dirs()
    with pytest.raises(EngineError) as caught:
        load(PairDirs(dirs.drafter, dirs.drafter))
    assert isinstance(caught.value, PairError | ConfigError)
    broken.assert_one_line(caught.value, "tiny-it-assistant", "drafter", "give it as drafter")


def test_target_given_as_drafter() -> None:
    """Guards the reverse swap."""
    dirs = build.random_pair_dirs()
    with pytest.raises(EngineError) as caught:
        load(PairDirs(dirs.target, dirs.target))
    assert isinstance(caught.value, PairError | ConfigError)
    broken.assert_one_line(caught.value, "tiny-it", "target", "give it as target")


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"hidden_size": 192}, ("backbone_hidden_size", "192", "hidden_size", "128")),
        ({"vocab_size": 576}, ("vocab_size", "576", "512")),
        ({"num_key_value_heads": 1}, ("num_key_value_heads", "1", "2")),
        ({"head_dim": 64}, ("head_dim", "64", "32")),
        ({"global_head_dim": 128}, ("global_head_dim", "128", "64")),
        ({"num_global_key_value_heads": 2}, ("num_global_key_value_heads", "2", "1")),
        ({"sliding_window": 32}, ("sliding_window", "32", "16")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_drafter_of_another_target(sizes: dict[str, int], says: tuple[str, ...]) -> None:
    """Guards the fit of the two: a drafter made for other sizes is refused with both numbers and their config keys."""
    other = build.random_pair_dirs(geometry=drafter_for_another(TINY, **sizes)).drafter
    with pytest.raises(PairError) as caught:
        load(PairDirs(build.random_pair_dirs().target, other))
    broken.assert_one_line(caught.value, *says)


def test_drafter_of_another_family_shape() -> None:
    """Guards a whole drafter for 31B beside a 12B target: still one line, about the first mismatch."""
    with pytest.raises(PairError) as caught:
        load(PairDirs(build.random_pair_dirs().target, build.random_pair_dirs(geometry=TINY_31B).drafter))
    broken.assert_one_line(caught.value, "192", "128")


@pytest.mark.parametrize("target_bits", [None, build.MIXED_BITS], ids=["bf16", "mixed"])
@pytest.mark.parametrize("drafter_bits", [None, 4, 8], ids=["bf16", "4bit", "8bit"])
def test_target_and_drafter_need_not_be_stored_alike(
    target_bits: dict[str, int] | None, drafter_bits: int | None
) -> None:
    """Guards a mixed pair: the target's quantization must never be read into the drafter, nor the other way round."""
    pair = build.make_pair(target_bits=target_bits, drafter_bits=drafter_bits)
    assert pair.drafter is not None
    caches = pair.target.new_caches()
    hidden = pair.target.prefill([2, 9, 40, 77], caches)
    drafts = pair.drafter.draft(5, hidden, pair.target.shared_kv(caches), 3)
    assert len(drafts) == 3
    assert all(0 <= token < TINY.vocab_size for token in drafts)


# -- what an opened checkpoint says about itself -----------------------------------------------------------------------


def test_opened_checkpoint_dequantizes_once_and_right() -> None:
    """Guards names, bits and values of `weight` against the builder's own tensors."""
    folder = build.random_pair_dirs(seed=5).target
    checkpoint = open_checkpoint(folder)
    masters = random_weights(target_shapes(TINY), 5)
    for module, bits in (("layers.0.mlp.gate_proj", 8), ("layers.5.self_attn.o_proj", 4), ("embed_tokens", 4)):
        weight = checkpoint.weight(module, torch.float32)
        master = masters[f"model.{module}.weight"]
        assert weight.bits == bits
        assert weight.data.shape == master.shape
        packed, scales, biases = quantize(master.bfloat16(), bits)
        assert torch.equal(weight.data, dequantize(packed, scales, biases, bits, dtype=torch.float32))
        assert (weight.data - master).abs().max() <= 2 * master.abs().max() / (2**bits - 1) + 2**-8
    norm = checkpoint.tensor("layers.3.self_attn.q_norm.weight")
    assert torch.equal(norm, masters["model.layers.3.self_attn.q_norm.weight"].bfloat16())


def test_fingerprint_names_no_path_and_sees_a_change(tmp_path: Path) -> None:
    """Guards records: the fingerprint identifies the files, without saying where they lie."""
    folder = broken.copy_pair(tmp_path).target
    before = open_checkpoint(folder).fingerprint()
    assert str(tmp_path) not in json.dumps(before)
    assert set(before["files"]) == {file.name for file in build.weight_files(folder)}
    broken.edit_text_config(folder, sliding_window=17)
    assert open_checkpoint(folder).fingerprint() != before


def test_content_hash_sees_one_bit(tmp_path: Path) -> None:
    """Guards the content hash: same sizes, same config, one flipped bit."""
    folder = broken.copy_pair(tmp_path).target
    before = open_checkpoint(folder).content_sha256()
    file = build.weight_files(folder)[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert open_checkpoint(folder).content_sha256() != before


def test_single_file_without_index_loads(tmp_path: Path) -> None:
    """Guards small checkpoints: one model.safetensors and no index is a whole checkpoint."""
    folder = broken.copy_pair(tmp_path).drafter
    (folder / "model.safetensors.index.json").unlink()
    assert "pre_projection.weight" in open_checkpoint(folder).entries


def test_text_section_may_be_the_whole_config(tmp_path: Path) -> None:
    """Guards text-only checkpoints, whose config.json has no text_config."""
    config = target_config(TINY)
    flat = {**config["text_config"], "model_type": "gemma4_unified_text", "eos_token_id": [1, 106]}
    nested = parse_target_config(config)
    parsed = parse_target_config(flat)
    assert parsed.layer_types == nested.layer_types
    assert parsed.eos_token_ids == (1, 106)
