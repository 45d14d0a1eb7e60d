"""A Qwen 3.5 checkpoint that mlx-lm converted, quantized and saved: the format oracle, and a second numeric one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

mx = pytest.importorskip("mlx.core", reason="mlx, the format oracle, is not installed")
mlx_utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm, the format oracle, is not installed")

from support_engine import one_thread, read_tensors, scratch_folder, write_checkpoint  # noqa: E402
from support_qwen35 import PACKED, random_target, target_config, write_target  # noqa: E402

from engine.dispatch import DispatchPolicy  # noqa: E402
from engine.pair import load_pair  # noqa: E402

TEXT = tuple(range(5, 45))
LOGITS_ATOL = 5e-4
"""fp32 on both sides, sums in another order."""


@pytest.fixture(scope="module")
def folders() -> tuple[Path, Path]:
    """(the hub's form in bf16, what mlx-lm made of it in 4 bits)."""
    folder = Path(tempfile.mkdtemp(prefix="qwen-mlx-", dir=scratch_folder()))
    mx.set_default_device(mx.cpu)
    weights = {f"model.language_model.{name}": w.to(torch.bfloat16) for name, w in random_target(PACKED).items()}
    write_checkpoint(folder / "hub", target_config(PACKED), weights)
    model, config = mlx_utils.quantize_model(*mlx_utils.load_model(folder / "hub"), 64, 4)
    mlx_utils.save_model(folder / "mlx", model)
    mlx_utils.save_config(config, folder / "mlx" / "config.json")
    return folder / "hub", folder / "mlx"


def test_what_mlx_lm_saved_is_read_as_mlx_reads_it(folders: tuple[Path, Path]) -> None:
    """Guards 1 + w, the turned convolution and packed projections of 4 rows, in files that we did not write."""
    model, _ = mlx_utils.load_model(folders[1])
    model.set_dtype(mx.float32)
    theirs = torch.tensor(model(mx.array([list(TEXT)]))[0].tolist())
    with one_thread():
        target = load_pair(folders[1], None, DispatchPolicy(), dtype=torch.float32).target
        caches = target.new_caches()
        ours = torch.stack([target.step([token], caches, "classic").logits[0] for token in TEXT])
    assert theirs.std().item() > 1.0
    assert (ours - theirs).abs().max().item() < LOGITS_ATOL
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_our_writer_gives_the_very_bytes_of_mlx_lm(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Tests and the committed small pair rest on it: a format of our own would prove nothing."""
    weights = {name: w.to(torch.bfloat16).float() for name, w in random_target(PACKED).items()}
    ours, theirs = read_tensors(write_target(tmp_path / "t", PACKED, weights, {"default": 4})), read_tensors(folders[1])
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype, name
        assert torch.equal(tensor, ours[name]), name
