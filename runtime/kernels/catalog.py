"""Configurations of the kernel sources that launchers load, and what they may need: what the compile tests go by."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.kernels import combine, dequant, gate, gemm, read_bytes, residual, residual_plan, route, rows
from runtime.kernels.compile import Source
from runtime.kernels.device import Gpu
from runtime.kernels.fused import plan
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.layout import SlotLayout
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


# GPUs whose plans are compiled: they differ in what they can do and in the shared memory of a block.
H200 = Gpu(0, "an H200", (9, 0), 132, 232448)
A100 = Gpu(0, "an A100", (8, 0), 108, 166912)
CONSUMER = Gpu(0, "a GPU with 99 KiB", (8, 9), 128, 101376)

_QWEN = ExpertShape(60, 4, 2048, 1408)
_DEEPSEEK = ExpertShape(64, 6, 2048, 1408)
_QWEN3 = ExpertShape(128, 8, 2048, 768)
_PHI = ExpertShape(16, 2, 4096, 6400)
_MIXTRAL = ExpertShape(8, 2, 4096, 14336)
_GPT_OSS = ExpertShape(32, 4, 2880, 2880, Activation.clamped, has_bias=True)
_ODD = (
    ExpertShape(5, 2, 64, 40, Activation.gelu),
    ExpertShape(257, 6, 288, 192, Activation.gelu_tanh, has_bias=True),
    ExpertShape(3, 3, 96, 48, Activation.clamped),
    ExpertShape(1, 1, 8, 8),
)
_INT4, _INT8, _BF16 = WeightForm("int4", 128), WeightForm("int8", -1), WeightForm("bf16")


def _fused(
    shape: ExpertShape,
    form: WeightForm,
    tokens: int,
    gpus: tuple[Gpu, ...] = (H200, A100),
    config: FusedConfig | None = None,
) -> tuple[Entry, ...]:
    """The fused kernel as each of some GPUs would run it; 128 registers are all that 512 threads can have."""
    layout = SlotLayout(shape, form)
    return tuple(
        Entry(plan(layout, tokens, config or FusedConfig(), gpu).source, 128, ("sm_90" if gpu is H200 else "sm_80",))
        for gpu in gpus
    )


def _residual(shape: ExpertShape, group_size: int, tokens: int, short_scales: bool = True) -> Entry:
    """Few tokens from residual records on an H200; 104 registers are all that 608 threads can have."""
    layout = SlotLayout(shape, WeightForm("int4", group_size))
    made = residual_plan.plan(layout, tokens, FusedConfig(), H200.smem_per_block_bytes, short_scales)
    return Entry(made.source, 104, ("sm_90",), max_spill_bytes=8)  # two registers, groups of 32


# Every `.cu` file has entries here for sm_80 and for sm_90 or sm_90a; one for each set of values that differs in kind.
CATALOG: tuple[Entry, ...] = (
    Entry(route.SOURCE, 64),
    Entry(gate.SOURCE, 40),
    Entry(read_bytes.SOURCE, 32),
    *(Entry(combine.source(activation), 64) for activation in Activation),
    Entry(rows.linear_source(4), 128),
    Entry(rows.linear_source(16), 80),
    Entry(rows.next_source(), 64),
    Entry(plan(SlotLayout(_QWEN, _INT4), 8, FusedConfig(), H200, beside=True).source, 96, ("sm_90",)),
    *(Entry(rows.norm_source(experts, width), 128) for experts, width in ((1024, 16384), (60, 2048))),
    *(Entry(rows.attention_source(size, groups), 128) for size, groups in ((128, 1), (64, 16), (96, 2), (256, 8))),
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
    *(
        Entry(
            residual.source(SlotLayout(shape, WeightForm("int4", group))), 80, max_spill_bytes=8
        )  # sm_80, one register
        for shape in (_QWEN, _GPT_OSS, _ODD[1])
        for group in (32, 64, 128)
    ),
    _residual(_QWEN, 128, 8),
    _residual(_QWEN, 128, 8, short_scales=False),
    _residual(_QWEN, 128, 16),
    _residual(_PHI, 128, 8),
    _residual(_GPT_OSS, 32, 16),
    _residual(_ODD[1], 64, 8),
    _residual(_ODD[3], -1, 8),
    Entry(
        residual_plan.plan(SlotLayout(_QWEN, _INT4), 8, FusedConfig(), H200.smem_per_block_bytes).source,
        104,
        ("sm_80",),
    ),
    *_fused(_QWEN, _INT4, 8, (H200, A100, CONSUMER)),
    *_fused(_QWEN, _INT4, 16, (H200, A100, CONSUMER)),
    *_fused(_QWEN, _INT4, 8, config=FusedConfig(block_dim=256, experts_per_block=8)),
    *_fused(_QWEN, _INT8, 8),
    *_fused(_QWEN, _BF16, 8, config=FusedConfig(block_dim=512)),
    *_fused(_QWEN, _BF16, 16, (H200, A100, CONSUMER), FusedConfig(k_split=8)),
    *(
        Entry(plan(SlotLayout(shape, _BF16), 8, FusedConfig(), H200).source, 96, (arch,))
        for shape, arch in ((_QWEN, "sm_90"), (_DEEPSEEK, "sm_90"), (_QWEN3, "sm_90"), (_QWEN, "sm_80"))  # which traps
    ),
    *_fused(_DEEPSEEK, _INT4, 16),
    *_fused(_QWEN3, _INT4, 16),
    *_fused(_PHI, _INT4, 8),
    *_fused(_PHI, _BF16, 16, (H200,)),
    *_fused(_MIXTRAL, _INT4, 8),
    *_fused(_MIXTRAL, WeightForm("int4", 64), 16, (H200,)),
    *_fused(_MIXTRAL, _BF16, 8, (H200,)),
    *_fused(_GPT_OSS, WeightForm("int4", 32), 8),
    *_fused(_GPT_OSS, _BF16, 16),
    *(
        entry
        for shape in _ODD
        for form, tokens in ((WeightForm("int4", -1), 16), (WeightForm("int8", 64), 16), (_BF16, 8))
        for entry in _fused(shape, form, tokens, (H200,) if tokens == 8 else (A100,))
    ),
    *_fused(_ODD[1], WeightForm("int4", 32), 16),
    *_fused(_ODD[2], WeightForm("int4", 64), 8),
    *_fused(_ODD[0], WeightForm("int4", 64), 16, (H200,)),
    Entry(plan(SlotLayout(_QWEN, _INT4), 8, FusedConfig(), H200).source, 128, ("sm_80",)),  # which traps
)
