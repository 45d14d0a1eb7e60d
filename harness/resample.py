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

    Array = np.ndarray[Any, Any]

CONFIDENCE = 0.95
RESAMPLES = 9999
SEED = 20260101


@lru_cache(maxsize=4)
def weights(sizes: tuple[int, ...], resamples: int = RESAMPLES, seed: int = SEED) -> Array:
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
    shares: Array = counts / counts.sum(axis=1, keepdims=True)
    shares.setflags(write=False)  # kept between calls
    return shares


def wide_tail(count: int) -> float:
    """Tail of the interval that an equivalence must lie in.

    A percentile interval of few values is too short: at six pairs a true effect of just the smallest size would be
    called equivalent in 7 % of runs (simulated), with this tail in 3 %. Source: Hesterberg, What Teachers Should Know
    about the Bootstrap (2015), expanded percentile interval: Student's t, and n - 1 for n.
    """
    from scipy.special import ndtr, stdtrit

    reach = stdtrit(count - 1, 1 - (1 - CONFIDENCE) / 2) * (count / (count - 1)) ** 0.5
    return float(ndtr(-reach))


def intervals(deltas: Array, sizes: tuple[int, ...], *, resamples: int = RESAMPLES) -> Array:
    """Intervals of the mean of many runs: deltas [runs, pairs] -> [4, runs].

    The 95 % percentile interval's low and high ends, then those of the wider one that an equivalence must lie in.
    """
    import numpy as np

    tail, wide = (1 - CONFIDENCE) / 2, wide_tail(sum(sizes))
    means = deltas @ weights(sizes, resamples).T
    found: Array = np.quantile(means, [tail, 1 - tail, wide, 1 - wide], axis=1, overwrite_input=True)
    return found


def interval(
    deltas: Sequence[float], processes: Sequence[int], *, resamples: int = RESAMPLES
) -> tuple[tuple[float, float], tuple[float, float]]:
    """The 95 % interval of one run's mean delta and the wider one; `processes` says which process each pair ran in."""
    import numpy as np

    if len(deltas) != len(processes):
        raise ValueError(f"{len(deltas)} deltas and {len(processes)} processes do not pair")
    order = sorted(range(len(deltas)), key=lambda place: processes[place])
    sizes = tuple(list(processes).count(process) for process in sorted(set(processes)))
    ordered = np.asarray([[deltas[place] for place in order]], dtype=float)
    low, high, wide_low, wide_high = intervals(ordered, sizes, resamples=resamples)[:, 0].tolist()
    return (low, high), (wide_low, wide_high)
