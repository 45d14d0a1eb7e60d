"""Checkpoints of grown pairs: nano's codes byte for byte, formats, sizes of the real geometries, bad input.

Nothing of real size is built: 12b and 31b are planned to the byte, and single matrices of theirs are built.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_engine import one_thread, read_config, read_tensors
from support_grow import NANO, build, distance, forward, grown, loaded, nano_run, prompt
from torch import Tensor

from engine import layers
from engine.quantize import dequantize, unpack
from tools import grow_pair as script
from tools.grow import pair as pair_module
from tools.grow.codes import from_packed
from tools.grow.errors import GrowError
from tools.grow.geometry import GEOMETRIES, Side
from tools.grow.maps import layer_map
from tools.grow.noise import hashed, noise
from tools.grow.pair import embedding_factor, grow_pair, plan_pair
from tools.grow.source import DRAFTER_NAME, TARGET_NAME, open_nano
from tools.grow.write import cut

STORED_MEAN = 0.12
"""Mean difference from nano's logits, which spread over 5, where norms and the table's scales are rounded to bf16."""

MLX_ATOL = 2e-3
"""fp32 on both sides, sums in another order and MLX's fast tanh and exp."""

RELEASED_BYTES = {"12b": (10_945_724_000, 237_883_912), "31b": (17_269_170_808, 939_037_192)}
"""Tensor bytes of the released target (language model alone) and assistant."""


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def nano_tensors() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stored tensors of nano's target and drafter."""
    target, drafter = (read_tensors(NANO / name) for name in (TARGET_NAME, DRAFTER_NAME))
    return target, drafter


# ---- the checkpoint -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", pytest.param("small4", marks=pytest.mark.slow)])
def test_stored_pair_loads_and_stays_close(name: str) -> None:
    """Guards the format: shards, names, bits per module, config; what bf16 takes from norms and scales is little."""
    folders = grown(name, False)
    assert len(list(folders.target.glob("*.safetensors"))) > 1
    pair = loaded(name, False)
    assert pair.info["target"]["quantization"].startswith({"small": "4-bit/8-bit", "small4": "4-bit"}[name])
    assert pair.info["drafter"]["quantization"].startswith({"small": "4-bit", "small4": "none"}[name])
    logits, drafts = forward(pair, prompt("code"))
    nano = nano_run("code", 2)
    assert distance(logits[:, :4096], nano.logits) < STORED_MEAN
    assert distance(drafts[:, :4096], nano.draft_logits) < 2 * STORED_MEAN
    assert "not Google's" in read_config(folders.target)["grown_from"]["pair"]


@pytest.mark.parametrize("name", ["small", pytest.param("small4", marks=pytest.mark.slow)])
def test_mlx_lm_loads_the_target(name: str) -> None:
    """Guards the other reader: mlx-lm's logits of the same folder are ours, in fp32."""
    mx = pytest.importorskip("mlx.core", reason="mlx, the format oracle, is not installed")
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm, the format oracle, is not installed")
    folders, ids = grown(name, False), prompt("code")[:16]
    model, _ = utils.load_model(folders.target)
    model.set_dtype(mx.float32)
    theirs = torch.tensor(model(mx.array([list(ids)]))[0, -4:].tolist())
    mine, _ = forward(loaded(name, False), ids)
    assert theirs.shape == mine.shape == (4, 8192)
    assert (mine - theirs).abs().max() < MLX_ATOL
    assert theirs.argmax(-1).tolist() == mine.argmax(-1).tolist()


def test_codes_are_nanos_bytes() -> None:
    """Guards against a second quantization: words, scales and biases of whole groups are copied as they are."""
    nano, nano_draft = nano_tensors()
    mine, mine_draft = (read_tensors(folder) for folder in grown("small", False))
    last, nano_last = "language_model.model.layers.{}.", "language_model.model.layers.{}."
    at, was = last.format(18), nano_last.format(12)
    rows = (torch.arange(2)[:, None] * 128 + torch.arange(64) * 2).flatten()
    for part, width in (("weight", 32), ("scales", 4), ("biases", 4)):
        key = f"self_attn.k_proj.{part}"
        assert _same(mine[at + key][rows, :width], nano[was + key]), part
        assert _same(mine[at + f"self_attn.v_proj.{part}"][rows // 128 * 128 + (rows % 128) // 2, :width],
                     nano[was + f"self_attn.v_proj.{part}"]), part  # fmt: skip
        wide = width * 2 if part == "weight" else width
        assert _same(mine[at + f"mlp.up_proj.{part}"][:768, :wide], nano[was + f"mlp.up_proj.{part}"]), part
        own = width // 2
        table = f"model.embed_tokens.{part}"
        assert _same(mine_draft[table][4096:, :own], nano_draft[table]), part
    words = mine["language_model.model.embed_tokens.weight"]
    assert _same(words[:4096, :32], nano["language_model.model.embed_tokens.weight"])
    assert _same(words[4096:], words[:4096])
    scales = mine["language_model.model.embed_tokens.scales"][:4096, :4].float()
    ratio = scales / nano["language_model.model.embed_tokens.scales"].float()
    assert (ratio / (16 / 17.875) - 1).abs().max() < 2**-8


def _same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.dtype == torch.uint32:
        return torch.equal(ours.contiguous().view(torch.int32), theirs.contiguous().view(torch.int32))
    return torch.equal(ours, theirs)


def test_split_codes_add_up_to_nanos() -> None:
    """31b's way for an 8-bit code: 16 times the high one plus the low one, bit for bit."""
    nano, mine = nano_tensors()[0], read_tensors(grown("small4", False).target)
    at, was = "language_model.model.layers.18.mlp.gate_proj", "language_model.model.layers.12.mlp.gate_proj"
    codes = unpack(mine[f"{at}.weight"], 4)[:768]
    assert torch.equal(codes[:, :256] * 16 + codes[:, 256:512], unpack(nano[f"{was}.weight"], 8))
    assert torch.equal(codes, unpack(mine[f"{at}.weight"], 4)[768:1536])
    scales = mine[f"{at}.scales"][:768]
    assert torch.equal(scales[:, :4], nano[f"{was}.scales"] * 16)
    assert torch.equal(scales[:, 4:8], nano[f"{was}.scales"])


def test_equal_logits_go_to_the_lowest_id() -> None:
    """Every row of the table has twins with the very same logit; text stays inside nano's vocabulary."""
    logits, drafts = forward(loaded("small", False, torch.bfloat16), prompt("list"))
    for rows in (logits, drafts):
        assert torch.equal(rows[:, :4096], rows[:, 4096:])
        assert (rows.argmax(-1) < 4096).all()


def test_a_random_layers_rounding_reaches_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the post-norm weights of random layers: not zero, so a kernel that differs only there still shows."""
    pair, ids = loaded("small", False, torch.bfloat16), prompt("code")
    before, _ = forward(pair, ids)
    only, real = pair.target._layers[17], layers._mlp  # the last layer of the random group

    def other_rounding(step: layers.Run, weights: layers.LayerWeights, x: Tensor) -> Tensor:
        step = dataclasses.replace(step, geglu=lambda bits: "ops") if weights is only else step
        return real(step, weights, x)

    monkeypatch.setattr(layers, "_mlp", other_rounding)
    after, _ = forward(pair, ids)
    assert not torch.equal(before, after)
    assert distance(before.float(), after.float()) < STORED_MEAN


def test_the_seed_decides_every_byte() -> None:
    """The same seed gives the same files; another one changes random layers and nothing of nano's."""
    first, again, other = (build(GEOMETRIES["small"], floats=False, seed=seed) for seed in (0, 0, 1))

    def digests(folder: Path) -> dict[str, str]:
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}

    for one, two in zip(first, again, strict=True):
        assert digests(one) == digests(two)
    old, new = read_tensors(first.target), read_tensors(other.target)
    changed = {name.split(".")[3] for name, tensor in old.items() if not _same(tensor, new[name])}
    assert changed == {str(layer) for layer in range(12, 18)}


def test_noise_is_the_same_on_every_device() -> None:
    """Integer hashing alone: these words hold for CPU and CUDA alike; weights spread as 1 / sqrt(K), around zero."""
    assert hashed(4, "0/a/codes", "cpu").tolist() == [1695487078, 443447993, 1625868543, 2029232983]
    for bits in (4, 8):
        weights = noise(256, 512, bits, "target/x", 0, "cpu").floats(torch.float32)
        assert abs(weights.mean().item()) * 512**0.5 < 0.05
        assert 0.9 < weights.std().item() * 512**0.5 < 1.1


# ---- the real geometries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["12b", "31b"])
def test_real_geometry_has_the_released_size(name: str) -> None:
    """Guards every shape and every bit: tensor bytes equal the released checkpoints', in shards below 5 GB."""
    sides = plan_pair(GEOMETRIES[name], open_nano(NANO, "cpu"), 0)
    assert tuple(side.nbytes for side in sides) == RELEASED_BYTES[name]
    for side in sides:
        assert max(shard.nbytes for shard in cut(side.modules)) < 5_000_000_000


def test_a_12b_matrix_holds_nanos_heads() -> None:
    """One real output projection: full head h of 512 columns, element j at 4j, zero elsewhere where inputs are not."""
    nano = open_nano(NANO, "cpu")
    target, _ = plan_pair(GEOMETRIES["12b"], nano, 0)
    module = next(m for m in target.modules if m.name == "target/layers.47.self_attn.o_proj.weight")
    words, scales, biases = (tensor for _, tensor in module.build("cpu"))
    mine = dequantize(words, scales, biases, 4, dtype=torch.float32)
    own = nano.target.codes("layers.17.self_attn.o_proj")
    stored = (own.scales[..., None] * own.codes + own.biases[..., None]).flatten(1)
    assert torch.equal(mine[:256, : 4 * 512].reshape(256, 4, 512)[..., ::4], stored.view(256, 4, 128))
    assert not mine[256:].any()
    assert not mine[:, 4 * 512 :].any()


def test_layers_and_factors_of_the_real_geometries() -> None:
    """The last group maps to the last, the rounded embedding scales are 62 and 73.5."""
    assert {layer // 6 for layer in layer_map(18, 48, 6)} == {1, 4, 7}
    assert {layer // 6 for layer in layer_map(18, 60, 6)} == {2, 5, 9}
    assert layer_map(18, 60, 6)[59] == 17
    nano = open_nano(NANO, "cpu").target_config
    for hidden, scale in ((3840, 62.0), (5376, 73.5)):
        config = dataclasses.replace(nano, hidden_size=hidden)
        assert embedding_factor(nano, config, torch.bfloat16) == 16 / scale
        assert embedding_factor(nano, config, torch.float32) == pytest.approx(16 / hidden**0.5, rel=1e-7)


def test_spread_keeps_codes_and_writes_near_zero_between() -> None:
    """Guards the full layers' output projection in codes: nothing moves but columns."""
    tensors = nano_tensors()[0]
    key = "language_model.model.layers.5.self_attn.o_proj"
    own = from_packed(*(tensors[f"{key}.{part}"] for part in ("weight", "scales", "biases")), bits=4, device="cpu")
    wide = own.spread(4)
    assert torch.equal(wide.codes.flatten(1)[:, ::4], own.codes.flatten(1))
    values = (wide.scales[..., None] * wide.codes + wide.biases[..., None]).flatten(1)
    between = values.view(values.shape[0], -1, 4)[..., 1:]
    assert between.abs().max() <= own.scales.abs().max() / 2


# ---- bad input ----------------------------------------------------------------------------------------------------


def _nano_copy(tmp_path: Path, spoil: Callable[[Path], Any]) -> Path:
    folder = tmp_path / "nano"
    for name in (TARGET_NAME, DRAFTER_NAME):
        (folder / name).mkdir(parents=True)
        for file in (NANO / name).iterdir():
            (folder / name / file.name).write_bytes(file.read_bytes())
    spoil(folder)
    return folder


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda folder: (folder / TARGET_NAME / "config.json").unlink(), "config.json: missing"),
        (lambda folder: (folder / DRAFTER_NAME / "config.json").write_text("{", encoding="utf-8"), "not valid JSON"),
        (lambda folder: (folder / TARGET_NAME).rename(folder / "elsewhere"), "no such checkpoint folder"),
        (lambda folder: _truncate(folder / TARGET_NAME / "model-00001-of-00002.safetensors"), "truncated"),
        (lambda folder: (folder / TARGET_NAME / "tokenizer.json").unlink(), "cannot write under"),
    ],
)
def test_a_broken_nano_pair_is_one_line(
    spoil: Callable[[Path], Any], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never a traceback, and no folder that looks complete."""
    out = tmp_path / "out"
    nano = _nano_copy(tmp_path, spoil)
    assert script.main(["--geometry", "small", "--out", str(out), "--nano", str(nano), "--device", "cpu"]) == 3
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert not out.exists() or not list(out.iterdir())


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def test_the_command_line_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A device that is not there, a folder that is, a file in the way; usage errors exit with 2."""
    base = ["--geometry", "small", "--out", str(tmp_path)]
    for device, expected in (("nonsense", "no such device"), ("meta", "not supported")):
        assert script.main([*base, "--device", device]) == 3
        assert expected in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert script.main([*base, "--device", "cuda"]) == 3
        assert "no CUDA device" in capsys.readouterr().err
    (tmp_path / GEOMETRIES["small"].folders[1]).mkdir()
    assert script.main([*base, "--device", "cpu"]) == 3
    assert "already there" in capsys.readouterr().err
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert script.main(["--geometry", "small", "--out", str(tmp_path / "file"), "--device", "cpu"]) == 3
    assert "cannot write" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        script.main(["--geometry", "70b", "--out", str(tmp_path)])


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is known from the plan."""
    monkeypatch.setattr(pair_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000_000_000))
    with pytest.raises(GrowError, match=r"11\.2 GB needed, 10\.0 GB free"):
        grow_pair(GEOMETRIES["12b"], NANO, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"vocab_size": 5000}, "no multiple of nano's 4096"),
        ({"head_dim": 96}, "no multiple of nano's 64"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2, "num_global_key_value_heads": 1}, "do not fit"),
        ({"target": Side(128, 1536, 24, 4, 8)}, "hidden_size 128 is less"),
        ({"target": Side(512, 1536, 12, 4, 8)}, "num_hidden_layers 12 is less"),
        ({"target": Side(320, 1536, 24, 4, 4)}, "no room for two copies"),
    ],
)
def test_a_geometry_without_room_is_refused(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    """Where, what, and before anything is written."""
    geometry = dataclasses.replace(GEOMETRIES["small"], **change)
    with pytest.raises(GrowError, match=expected):
        grow_pair(geometry, NANO, tmp_path)
    assert not list(tmp_path.iterdir())
