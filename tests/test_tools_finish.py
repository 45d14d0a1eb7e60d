"""The tuner's chains of finishing products: what it tries can be launched, its bytes are checked, its lines printed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="triton is not built for this platform")

import triton
import triton.language as tl

from kernels import finishing
from kernels.gate.cases import GEOMETRIES, Attention, Geometry
from kernels.jit import INTERPRETED
from kernels.launch import TABLE, LaunchShape, even_split
from tools import tune_finish
from tools.tune_finish import Bench, Chain, candidates, chains, compare, to_compile, unfinished, warm
from tools.tune_qmv import Memory

TINY = Geometry(
    "tiny", 128, 64, 4, 8, (Attention("sliding", 1, 1, 64, 16), Attention("full", 2, 1, 64, None, k_eq_v=True))
)
overflows = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
"""numpy, under the interpreter, announces what slots that nobody wrote may hold."""

DEVICE = "cpu" if INTERPRETED.value else "cuda"


def on_the_host(runs: Sequence[Callable[[], object]], calls: int) -> list[float]:
    """A clock without graphs."""
    took = []
    for run in runs:
        begin = time.perf_counter()
        run()
        took.append((time.perf_counter() - begin) * 1e6 / calls)
    return took


def tiny(name: str) -> tuple[Chain, Memory]:
    """The tiny model's chain of that name and memory for its matrices once."""
    chain = next(chain for chain in chains([TINY]) if name in chain.name)
    nbytes = sum(-(-n // 64) * 64 * k * bits // 8 for k, n, bits in (chain.matrix, chain.then or (0, 0, 4)))
    return chain, Memory(nbytes // 2, 0, DEVICE)


def test_every_chain_starts_with_a_matrix_of_the_table() -> None:
    """Otherwise the figures would be of launch shapes that nothing runs with."""
    found = list(chains(GEOMETRIES[:2]))
    assert len(found) == 12
    for chain in found:
        assert chain.matrix in TABLE, chain.name
        assert chain.then is None or chain.then in TABLE


@pytest.mark.parametrize("chain", list(chains(GEOMETRIES[:2])), ids=lambda chain: chain.name)
def test_what_is_tried_can_be_launched(chain: Chain) -> None:
    """No part of K is empty, gate and up have whole tiles, and the table's own shape comes first."""
    shapes, (width, columns, _) = candidates(chain), chain.matrix
    assert shapes[0] == replace(TABLE[chain.matrix], finish=chain.finish)
    assert 5 < len(shapes) < 45
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        steps = width // 64 // shape.unroll
        assert even_split(steps, shape.split) == shape.split
        assert chain.finish != "gated" or columns % (2 * shape.tile) == 0


def test_all_that_runs_is_compiled_first() -> None:
    """A binary compiled between two timings would take its seconds from the run."""
    some = [chain for chain in chains(GEOMETRIES[:2]) if "down" in chain.name]
    products, consumers = to_compile(some)
    for chain in some:
        for shape in (unfinished(chain), *candidates(chain)):
            assert any(
                (replace(made, split=1), of.matrix[2]) == (replace(shape, split=1), chain.matrix[2])
                for of, made in products
            )
            assert any((of, made.tile, made.finish) == (chain, shape.tile, shape.finish) for of, made in consumers)
    assert len(products) < 60


@overflows
@pytest.mark.parametrize("name", ["sliding qkv", "full o", "gate_up"])
def test_a_chain_is_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From random memory to the printed lines; the chain runs as the engine's ops run it."""
    chain, memory = tiny(name)
    shape = LaunchShape(64, 1, 2, 2, 2, chain.finish)
    monkeypatch.setattr(tune_finish, "candidates", lambda _: [shape])
    monkeypatch.setattr(tune_finish, "ROWS", (2,))
    warm([(chain, shape)], DEVICE)
    lines = compare(chain, memory, on_the_host)
    assert len(lines) == 1
    assert all(chain.name in line and line.endswith(f'"{chain.finish}"') and "%" in line for line in lines)


@triton.jit
def without_the_first(parts_ptr, offset, real, split, TILE: tl.constexpr):
    """Forgets a part."""
    return tl.load(parts_ptr + 8 * TILE + offset, mask=real, other=0.0)


def test_other_bytes_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A faster product with other sums is no product."""
    chain, memory = tiny("sliding qkv")
    shape = LaunchShape(64, 1, 2, 2, 2, "sum")
    monkeypatch.setattr(tune_finish, "candidates", lambda _: [shape])
    monkeypatch.setattr(tune_finish, "ROWS", (1,))
    assert not Bench(chain, memory).differs(shape)
    monkeypatch.setattr(finishing, "_total", without_the_first)
    with pytest.raises(ArithmeticError, match="sliding qkv, heads: finished and unfinished products"):
        compare(chain, memory, on_the_host)


def test_a_matrix_without_a_chain_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, before anything is started."""
    assert tune_finish.main([(1024, 3840, 4)], 1) == 2
    assert "no chain" in capsys.readouterr().err
