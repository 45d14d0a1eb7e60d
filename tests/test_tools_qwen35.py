"""What trains the small Qwen 3.5 pair: its drafter is the engine's, its quantized weights are what the engine loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("transformers", reason="transformers, which the trainer trains, is not installed")

import transformers
from support_dflash import Float64Drafter
from support_engine import one_thread
from support_qwen35 import QwenGeometry

from engine.decision import prepare_mtp
from engine.pair import load_pair
from engine.qwen35.config import parse_drafter_config, parse_target_config
from tools import train_qwen35_nano as trainer
from tools.nano.tokens import train_tokenizer
from tools.qwen35.dflash import block_logits, init
from tools.qwen35.shape import QwenNano
from tools.seed_qwen35_pair import REAL, write_pair

SHAPE = QwenNano(vocab_size=512, num_hidden_layers=4, taps=(0, 2), hidden_size=64, intermediate_size=64, head_dim=32)


FACTS = {
    "seed": 0,
    "target": {"steps": 3, "tokens": 4608, "seconds": 5, "held_out_loss": 2.5},
    "drafter": {"steps": 2, "seconds": 1, "sequences": 9, "right": [0.5, 0.25]},
    "data": {"files": 1, "bytes": 10, "held_out_files": 1},
}
"""As the trainer records them."""


def geometry() -> QwenGeometry:
    """The same sizes as the tests' own helper names them."""
    return QwenGeometry(
        vocab_size=SHAPE.vocab_size,
        hidden_size=SHAPE.hidden_size,
        num_hidden_layers=SHAPE.num_hidden_layers,
        drafter_layers=SHAPE.drafter_layers,
        drafter_heads=SHAPE.drafter_heads,
        drafter_kv_heads=SHAPE.drafter_kv_heads,
        drafter_head_dim=SHAPE.drafter_head_dim,
        taps=SHAPE.taps,
    )


def test_the_drafter_in_training_is_the_drafter() -> None:
    """Blocks are trained many at once under one mask; a key too many would teach what decoding cannot see."""
    weights = {name: value.detach() for name, value in init(SHAPE, 1).items()}
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=generator) * 0.2
    taps = torch.randn(2, 40, len(SHAPE.taps) * SHAPE.hidden_size, generator=generator)
    tokens = torch.randint(5, SHAPE.vocab_size, (2, 40), generator=generator)
    starts = torch.tensor([3, 17, 30])
    found = block_logits(SHAPE, weights, table, taps, tokens, starts, 8)
    shaped = dataclasses.replace(geometry(), vocab_size=SHAPE.mask_token_id + 1)  # its mask is the last id
    oracle = Float64Drafter(shaped, weights, table)
    for sequence in range(2):
        for block, start in enumerate(starts.tolist()):
            theirs = oracle.logits(int(tokens[sequence, start]), taps[sequence, :start], 7)
            assert (found[sequence, block].double() - torch.from_numpy(theirs)).abs().max() < 1e-4


@pytest.mark.slow
def test_written_checkpoints_load_and_hold_what_was_trained(tmp_path: Path) -> None:
    """The drafter is distilled on the quantized target: the engine must load that very function."""
    torch.manual_seed(3)
    config = transformers.Qwen3_5TextConfig(**SHAPE.text_config())
    config._attn_implementation = "eager"
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    masters = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(trainer.quantized_state(masters))
    tokenizer = train_tokenizer([Path(__file__).read_text(encoding="utf-8")], SHAPE.vocab_size)
    trainer.write_target(tmp_path / "target", SHAPE, masters, tokenizer, FACTS)
    trainer.write_drafter(tmp_path / "drafter", SHAPE, {name: w.detach() for name, w in init(SHAPE, 1).items()})
    with one_thread():
        pair = load_pair(tmp_path / "target", tmp_path / "drafter", dtype=torch.float32)
        assert pair.tokenizer is not None
        assert "0.500, 0.250" in (tmp_path / "target" / "README.md").read_text(encoding="utf-8")
        assert pair.tokenizer.bos_id is None
        tokens = list(pair.tokenizer.encode_chat([{"role": "user", "content": "def write"}]).ids)
        caches = pair.target.new_caches()
        ours = pair.target.logits(pair.target.prefill(tokens, caches).unsqueeze(0))[0]
        with torch.inference_mode():
            theirs = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        assert (ours - theirs).abs().max() < 1e-4
        assert len(pair.drafter.draft(tokens[-1], ours, pair.target.shared_kv(caches), 7)) == 7


def test_a_seeded_pair_loads_probes_and_is_the_same_again(tmp_path: Path) -> None:
    """It stands for the real shapes where nobody's weights are: its logits must be alive, and its bytes a seed's."""
    shape = dataclasses.replace(SHAPE, mask_token_id=500, linear_value_head_dim=32)
    target, drafter = write_pair(tmp_path / "a", shape, 7)
    again, _ = write_pair(tmp_path / "b", shape, 7)
    assert (target / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    with one_thread():
        pair = load_pair(target, drafter)
        logits = pair.target.step([5], pair.target.new_caches(), "classic").logits
        assert 0.5 < logits.float().std().item() < 5
        decision, _ = prepare_mtp(pair, 4, draws=(8,), walk=False)
    assert decision.engaged
    stated = [pair.info[role]["seeded"] for role in ("target", "drafter")]
    assert stated == ["random weights from seed 7"] * 2, "its record must say whose weights these are"


def test_the_seeded_shapes_are_the_ones_that_the_spec_expects() -> None:
    """A geometry check that could only fail on a GPU would be found there, an hour too late."""
    text = (Path(__file__).resolve().parent.parent / "specs" / "qwen35_4b_seeded.yaml").read_text(encoding="utf-8")
    expected = yaml.safe_load(text)["checks"][0]["expect"]
    found = {
        "target": parse_target_config(REAL.target_config()),
        "drafter": parse_drafter_config(REAL.drafter_config()),
    }
    for role, fields in ((role, expected[role]) for role in found):
        assert {name: getattr(found[role], name) for name in fields} == fields


def test_every_stop_token_and_mask_lies_in_the_vocabulary() -> None:
    """A mask outside the table would fail at the first draft, after all of the training."""
    shape = QwenNano()
    config = shape.target_config()
    assert max(*config["eos_token_id"], shape.mask_token_id) < shape.vocab_size
    assert shape.drafter_config()["dflash_config"]["target_layer_ids"] == list(shape.taps)
