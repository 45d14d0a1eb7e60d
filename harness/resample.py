"""The hierarchical bootstrap: processes are drawn, then pairs inside each drawn process. Pure; numpy is imported late.

A resample of fixed sizes is a fixed set of weights, so the interval of one run and of a thousand simulated runs is the
same product of matrices: what `harness power` simulates is the very rule that judges. Draws come from a bit generator's
raw words, whose stream numpy keeps from version to version, so a record can be recomputed.
Source: Kalibera & Jones, Rigorous Benchmarking in Reasonable Time (ISMM 2013), resampling over levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 9999
SEED = 20260101


@lru_cache(maxsize=4)
def weights(sizes: tuple[int, ...], resamples: int = RESAMPLES, seed: int = SEED) -> np.ndarray[Any, Any]:
    """Share of each pair in each resampled mean [resamples, sum(sizes)]; pairs are in order of their process."""
    import numpy as np

    if not sizes or min(sizes) < 1:
        raise ValueError(f"a resample needs at least one pair in each process, got {list(sizes)}")
    count, processes, most = sum(sizes), len(sizes), max(sizes)
    words = np.random.PCG64(seed).random_raw(resamples * processes * (1 + most))
    uniform = ((words >> np.uint64(11)) * 2.0**-53).reshape(resamples, processes, 1 + most)
    size = np.asarray(sizes)
    start = np.concatenate(([0], np.cumsum(size)[:-1]))
    process = (uniform[:, :, 0] * processes).astype(int)
    drawn = start[process][:, :, None] + (uniform[:, :, 1:] * size[process][:, :, None]).astype(int)
    used = np.arange(most) < size[process][:, :, None]
    places = (np.arange(resamples)[:, None, None] * count + drawn)[used]
    counts = np.bincount(places, minlength=resamples * count).reshape(resamples, count)
    shares: np.ndarray[Any, Any] = counts / counts.sum(axis=1, keepdims=True)
    shares.setflags(write=False)  # kept between calls
    return shares


def intervals(
    deltas: np.ndarray[Any, Any], sizes: tuple[int, ...], *, resamples: int = RESAMPLES
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """95 % percentile intervals of the mean of many runs: deltas [runs, pairs] -> low [runs], high [runs]."""
    import numpy as np

    tail = (1 - CONFIDENCE) / 2
    means = weights(sizes, resamples) @ deltas.T
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low, high


def interval(deltas: Sequence[float], processes: Sequence[int], *, resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % interval of the mean delta of one run; `processes` says which process each pair ran in."""
    import numpy as np

    if len(deltas) != len(processes):
        raise ValueError(f"{len(deltas)} deltas and {len(processes)} processes do not pair")
    order = sorted(range(len(deltas)), key=lambda place: processes[place])
    sizes = tuple(list(processes).count(process) for process in sorted(set(processes)))
    low, high = intervals(np.asarray([[deltas[place] for place in order]], dtype=float), sizes, resamples=resamples)
    return float(low[0]), float(high[0])
