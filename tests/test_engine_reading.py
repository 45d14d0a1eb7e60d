"""Loading: bytes as they are in the file, each read once, no matrix dequantized, small temporary copies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support_engine import one_thread
from support_grow import NANO

from engine import checkpoint as checkpoint_module
from engine import reading
from engine.checkpoint import open_checkpoint
from engine.dispatch import DispatchPolicy
from engine.errors import CheckpointError
from engine.pair import load_pair
from engine.reading import Meter, Ring, read_staged, read_tensor
from kernels import repack
from tools.grow.source import DRAFTER_NAME, TARGET_NAME


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 64 * 3, 64 * 7 + 5])
def test_staged_bytes_are_the_files(tmp_path: Path, nbytes: int) -> None:
    """A ring that is overwritten before its copy has left it, or a wrong offset, would load other weights."""
    content = os.urandom(1000)
    file = tmp_path / "x.bin"
    file.write_bytes(content)
    ring = Ring("cpu", slots=3, chunk_bytes=64)
    for start in (0, 17):
        assert bytes(read_staged(file, start, nbytes, ring).numpy()) == content[start : start + nbytes]


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the threads' split: a part at a wrong place would still have the right size."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", 64)
    values = torch.randint(-(2**31), 2**31 - 1, (25, 9), dtype=torch.int32)
    file = tmp_path / "x.bin"
    file.write_bytes(b"\0" * 24 + values.numpy().tobytes())
    meter = Meter()
    assert torch.equal(read_tensor(file, 24, "I32", (25, 9), "cpu", meter), values)
    assert meter.nbytes == 900
    assert meter.seconds > 0


@pytest.mark.parametrize("staged", [False, True])
def test_a_file_that_lost_its_end_is_an_error(tmp_path: Path, staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file cut after its header was read must not give uninitialised memory for weights, nor hang."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", 64)
    file = tmp_path / "x.bin"
    file.write_bytes(b"\1" * 500)
    ring = Ring("cpu", slots=2, chunk_bytes=64)
    with pytest.raises(CheckpointError, match=r"x\.bin: cannot be read: it ends at byte 500"):
        read_staged(file, 0, 512, ring) if staged else read_tensor(file, 0, "U8", (512,), "cpu")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensor(tmp_path / "none.bin", 0, "U8", (1,), "cpu")


def test_a_child_reads_each_tensor_once_and_dequantizes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the start of a child with 18 GB of weights: a second read or a bf16 copy costs seconds and memory."""
    seen: list[tuple[str, int]] = []
    real = checkpoint_module.read_tensor

    def spy(file: Path, start: int, *rest: Any) -> torch.Tensor:
        seen.append((file.parent.name + file.name, start))
        return real(file, start, *rest)

    def refuse(*_: Any) -> torch.Tensor:
        raise AssertionError("a matrix was dequantized at load")

    monkeypatch.setattr(checkpoint_module, "read_tensor", spy)
    monkeypatch.setattr(checkpoint_module, "dequantize", refuse)
    pair = load_pair(NANO / TARGET_NAME, NANO / DRAFTER_NAME, DispatchPolicy(backend="triton"))
    stored = [open_checkpoint(NANO / name).entries for name in (TARGET_NAME, DRAFTER_NAME)]
    wanted = {(entry.file.parent.name + entry.file.name, entry.start) for part in stored for entry in part.values()}
    assert len(seen) == len(set(seen))
    assert set(seen) == wanted
    assert list(pair.info["phases"]) == ["device", "open", "read", "prepare", "drafter", "tokenizer"]
    assert all(seconds >= 0 for seconds in pair.info["phases"].values())


@pytest.mark.parametrize(("rows", "bits"), [(80, 4), (80, 8), (33, 4), (128, 4)])
def test_a_matrix_repacked_in_slabs_has_the_same_bytes(rows: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The LM head is repacked a slab at a time; a slab at a wrong tile would move rows of the vocabulary."""
    torch.manual_seed(rows)
    words = torch.randint(-(2**31), 2**31 - 1, (rows, 128 * bits // 32), dtype=torch.int32).view(torch.uint32)
    scales, biases = torch.randn(2, rows, 2).bfloat16()
    whole = repack.pack_weight(words, scales, biases, bits)
    monkeypatch.setattr(repack, "SLAB_BYTES", 1)
    parts = repack.pack_weight(words, scales, biases, bits)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.scales, parts.scales)
    found = repack.unpack_weight(parts)
    assert torch.equal(found[0].view(torch.int32), words.view(torch.int32))
    assert torch.equal(found[1], scales)
    assert torch.equal(found[2], biases)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_gets_the_files_bytes(tmp_path: Path) -> None:
    """Guards the pinned ring on a real device: a buffer that is filled again before its copy has left it."""
    values = torch.randint(0, 255, (80 << 20,), dtype=torch.uint8)
    file = tmp_path / "x.bin"
    file.write_bytes(values.numpy().tobytes())
    for start in (0, 1 << 20, 12345):
        count = (len(values) - start) // 4
        found = read_tensor(file, start, "U32", (count,), "cuda")
        assert torch.equal(found.view(torch.uint8).cpu(), values[start : start + 4 * count])
    reading.release()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_matrix_is_repacked_on_the_device_as_on_the_cpu() -> None:
    """Guards the repack against a device whose shifts or views differ; and its temporary memory."""
    words = torch.randint(-(2**31), 2**31 - 1, (40_000, 640), dtype=torch.int32).view(torch.uint32)
    scales, biases = torch.randn(2, 40_000, 80).bfloat16()
    expected = repack.pack_weight(words, scales, biases, 4)
    given = [part.cuda() for part in (words, scales, biases)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = repack.pack_weight(given[0], given[1], given[2], 4)
    assert torch.equal(found.codes.cpu(), expected.codes)
    assert torch.equal(found.scales.cpu(), expected.scales)
    size = found.codes.numel() + 4 * found.scales.numel()
    assert torch.cuda.max_memory_allocated() - before < size + 8 * repack.SLAB_BYTES  # an H200 took 7.0
