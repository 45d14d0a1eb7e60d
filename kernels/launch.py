"""How a product is launched: a checked-in table by (K, N, bits), and a safe default for every other shape.

A row's bytes depend on the split and on the order within it, so a launch shape may depend on the matrix and never on
the number of rows. `tools/tune_qmv.py` measures candidates on a GPU and prints rows for this table.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 64
PROGRAMS = 800
"""Programs that the default aims for: about six on each of 132 multiprocessors."""


@dataclass(frozen=True)
class Card:
    """How many multiprocessors a card has, and the shared memory of each, bytes."""

    multiprocessors: int
    shared_bytes: int


CARDS = {90: Card(132, 228 << 10), 120: Card(170, 100 << 10)}
"""A card of each architecture that kernels are built for without one: an H200 and a GeForce RTX 5090."""

SYSTEM_BYTES, SPARE_BYTES = 1 << 10, 3 << 10
"""Shared memory that a program takes besides its own, and what is left free for small programs beside a product's."""


@dataclass(frozen=True)
class LaunchShape:
    """tile rows of the matrix a program, unroll groups of 64 inputs a step, stages of a step each that are held, warps,
    split of K."""

    tile: int
    unroll: int
    stages: int
    warps: int
    split: int

    def __post_init__(self) -> None:
        powers = all(size > 0 and size & (size - 1) == 0 for size in (self.tile, self.unroll, self.warps))
        if not powers or self.tile < 16 or self.tile < 16 * self.warps or self.stages < 1 or self.split < 1:
            raise ValueError(f"{self}: tile, unroll and warps must be powers of two, tile at least 16 for each warp")


TABLE: dict[tuple[int, int, int], LaunchShape] = {
    (1024, 3840, 4): LaunchShape(64, 2, 3, 2, 8),
    (1024, 4096, 4): LaunchShape(64, 2, 2, 2, 8),
    (1024, 5376, 4): LaunchShape(64, 1, 3, 2, 6),
    (1024, 8192, 4): LaunchShape(64, 1, 3, 2, 4),
    (1024, 16384, 4): LaunchShape(64, 1, 3, 2, 4),
    (1024, 262144, 4): LaunchShape(128, 1, 3, 4, 1),
    (3840, 8192, 4): LaunchShape(64, 2, 2, 2, 10),
    (3840, 8704, 4): LaunchShape(64, 1, 3, 1, 10),
    (3840, 15360, 4): LaunchShape(64, 1, 3, 1, 6),
    (3840, 30720, 4): LaunchShape(128, 1, 5, 2, 2),
    (3840, 262144, 4): LaunchShape(128, 2, 3, 4, 1),
    (4096, 1024, 4): LaunchShape(64, 1, 3, 2, 32),
    (4096, 3840, 4): LaunchShape(64, 1, 3, 2, 13),
    (5376, 16384, 4): LaunchShape(128, 2, 3, 4, 3),
    (5376, 18432, 4): LaunchShape(128, 2, 2, 2, 6),
    (5376, 43008, 4): LaunchShape(128, 1, 2, 2, 3),
    (5376, 262144, 4): LaunchShape(128, 2, 3, 2, 1),
    (7680, 1024, 4): LaunchShape(64, 2, 3, 2, 30),
    (8192, 1024, 4): LaunchShape(64, 2, 3, 2, 32),
    (8192, 3840, 4): LaunchShape(64, 2, 2, 2, 22),
    (8192, 5376, 4): LaunchShape(128, 2, 2, 2, 16),
    (10752, 1024, 4): LaunchShape(64, 2, 3, 2, 28),
    (15360, 3840, 4): LaunchShape(64, 1, 3, 1, 24),
    (16384, 1024, 4): LaunchShape(64, 2, 3, 2, 32),
    (16384, 5376, 4): LaunchShape(128, 2, 3, 4, 12),
    (21504, 5376, 4): LaunchShape(64, 2, 3, 2, 9),
    (1024, 262144, 8): LaunchShape(256, 1, 2, 4, 1),
    (3840, 8192, 8): LaunchShape(128, 2, 2, 4, 10),
    (3840, 15360, 8): LaunchShape(128, 1, 4, 4, 3),
    (3840, 30720, 8): LaunchShape(256, 1, 3, 4, 2),
    (4096, 3840, 8): LaunchShape(64, 1, 4, 2, 8),
    (5376, 16384, 8): LaunchShape(128, 1, 5, 4, 2),
    (5376, 43008, 8): LaunchShape(128, 1, 4, 4, 1),
    (8192, 3840, 8): LaunchShape(64, 1, 4, 2, 9),
    (8192, 5376, 8): LaunchShape(128, 1, 4, 4, 7),
    (15360, 3840, 8): LaunchShape(64, 1, 3, 2, 11),
    (21504, 5376, 8): LaunchShape(128, 1, 3, 4, 12),
    (1024, 5376, 16): LaunchShape(32, 1, 4, 1, 3),
    (1024, 8192, 16): LaunchShape(32, 1, 4, 1, 2),
    (1024, 16384, 16): LaunchShape(32, 1, 5, 1, 1),
    (1024, 262144, 16): LaunchShape(128, 1, 4, 4, 1),
    (8192, 1024, 16): LaunchShape(32, 1, 4, 1, 16),
    (10752, 1024, 16): LaunchShape(32, 1, 5, 1, 12),
    (16384, 1024, 16): LaunchShape(32, 1, 5, 1, 13),
}
"""(K, N, bits) of every matrix of Gemma 4 12B, 31B and their drafters, fused as the engine fuses them."""


def launch_shape(width: int, rows: int, bits: int) -> LaunchShape:
    """The launch shape of a matrix with K = width and N = rows; ValueError unless K is a multiple of 64."""
    if width % GROUP or width <= 0 or rows <= 0:
        raise ValueError(f"launch_shape: K = {width}, N = {rows}; K must be a positive multiple of {GROUP}, N positive")
    known = TABLE.get((width, rows, bits))
    return known if known is not None else _default(width, rows)


def _default(width: int, rows: int) -> LaunchShape:
    """A small tile, one group a step, and K split until there are enough programs or four groups each."""
    groups = width // GROUP
    tile = 64 if rows >= 64 * 32 else 32
    tiles = -(-rows // tile)
    split = max(1, min(PROGRAMS // tiles, groups // 4, 32))
    return LaunchShape(tile, 1, 4, 2, even_split(groups, split))


def even_split(groups: int, split: int) -> int:
    """The number of parts that remain when each gets ceil(groups / split) groups: no part is left empty."""
    return -(-groups // -(-groups // split))


def even_room(programs: int, card: Card) -> int:
    """Shared memory that each of a launch's programs asks for so that no multiprocessor takes more than its share of
    them; bytes, a multiple of 128, 0 where a share is too small to be kept so."""
    share = -(-programs // card.multiprocessors)
    room = ((card.shared_bytes - SPARE_BYTES) // share - SYSTEM_BYTES) // 128 * 128
    one_more = (share + 1) * (room + SYSTEM_BYTES)
    return room if room > 0 and one_more > card.shared_bytes else 0
