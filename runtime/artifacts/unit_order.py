"""The order of a GPU's matrix instruction: units of 16 rows x 128 columns, spread over the 32 lanes of a warp.

Lane l = 4 r + q of a unit holds 64 elements, e = 8 step + 4 kh + 2 rh + lo. Element e is row r + 8 rh and column
32 (step // 2) + 8 q + 4 (step % 2) + 2 kh + lo: what `mma.m16n8k16` wants of its A operand, columns permuted so that
the four lanes of a row read neighbouring bytes (docs/kernels.md).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

ROWS, COLUMNS, LANES, ELEMENTS = 16, 128, 32, 64
UNIT_WEIGHTS = ROWS * COLUMNS
BLOCK_UNITS = 8  # of a residual record: what a kernel copies and rebuilds at once


def tiles_and_units(rows: int, columns: int) -> tuple[int, int]:
    """Tiles of 16 rows, and units of a tile."""
    return -(-rows // ROWS), -(-columns // COLUMNS)


@functools.lru_cache(maxsize=8)
def unit_index(rows: int, columns: int, paired: bool) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Where each element of a [rows, columns] matrix in unit order lies row by row: [tiles * units * 2048].

    Places behind the ends of rows and columns, which fill up the last units, have the index rows * columns.

    Args:
        rows, columns: of the matrix.
        paired: tile j joins rows 8j to 8j + 7 of the first half of the rows with those of the second (gate and up);
            else it is rows 16j to 16j + 15.
    """
    tiles, units = tiles_and_units(rows, columns)
    lane, element = np.arange(LANES)[:, None], np.arange(ELEMENTS)[None, :]
    step, kh, rh, lo = element // 8, element // 4 % 2, element // 2 % 2, element % 2
    column = 32 * (step // 2) + 8 * (lane % 4) + 4 * (step % 2) + 2 * kh + lo
    column = column + COLUMNS * np.arange(units)[:, None, None]  # [units, 32, 64]
    within, tile = lane // 4, np.arange(tiles)[:, None, None]
    if paired:
        half = rows // 2
        row = np.where(8 * tile + within < half, 8 * tile + within + half * rh, rows)
    else:
        row = 16 * tile + 8 * rh + within  # [tiles, 32, 64]
    inside = (row[:, None] < rows) & (column < columns)
    return np.where(inside, row[:, None] * columns + column, rows * columns).reshape(-1)
