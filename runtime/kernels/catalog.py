"""Configurations of the kernel sources that launchers load, and what they may need: what the compile tests go by."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.kernels import combine, dequant, gemm, read_bytes, route
from runtime.kernels.compile import Source
from runtime.kernels.shape import Activation, ExpertShape, WeightForm

EVERYWHERE = ("sm_80", "sm_90")  # what is compiled for these runs from compute capability 8.0 up
HOPPER = ("sm_90a",)


@dataclass(frozen=True, slots=True)
class Entry:
    """One source with one set of values; none of its kernels may spill registers.

    Attributes:
        source: best as the launcher's own function builds it, so that the two stay the same.
        max_registers: a thread, over all kernels of the source and all architectures.
        archs: that it must compile for.
        max_spill_bytes: 0, unless measured to be faster so.
    """

    source: Source
    max_registers: int
    archs: tuple[str, ...] = EVERYWHERE
    max_spill_bytes: int = 0


# Every `.cu` file has entries here for sm_80 and for sm_90 or sm_90a; one for each set of values that differs in kind.
CATALOG: tuple[Entry, ...] = (
    Entry(route.SOURCE, 64),
    Entry(read_bytes.SOURCE, 32),
    *(Entry(combine.source(activation), 64) for activation in Activation),
    *(
        Entry(gemm.source(ExpertShape(60, 4, 2048, 1408, activation, has_bias), tile), 168, ("sm_80", *HOPPER), spill)
        for tile, activation, has_bias, spill in (
            (gemm.NARROW, Activation.silu, False, 0),
            (gemm.NARROW, Activation.gelu, True, 0),
            (gemm.WIDE, Activation.silu, False, 0),
            (gemm.PAIRED, Activation.clamped, True, 32),  # two registers, before the first tile
        )
    ),
    *(Entry(dequant.source(WeightForm(kind, group)), 80) for kind in ("int4", "int8") for group in (32, 64, 128)),
)
