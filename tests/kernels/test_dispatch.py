"""Which backend computes how many tokens, and that it is made when it is needed: with stand-ins, no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from runtime.errors import KernelError, ShapeError
from runtime.kernels import dispatch
from runtime.kernels.device import Gpu
from runtime.kernels.dispatch import ExpertKernels
from runtime.kernels.fused import FusedConfig
from runtime.kernels.grouped import MAX_GROUPS
from runtime.kernels.layout import SlotLayout
from runtime.kernels.reference import LIBRARY, compute_torch, error_bound, slot_experts
from runtime.kernels.shape import ExpertShape, WeightForm
from runtime.kernels.tuning import INVARIANT_TOKENS, DispatchEntry, DispatchTable, TokenRange
from tests.kernels.cases import make_pool, make_tokens

SHAPE = ExpertShape(8, 2, 64, 96)
INT4, BF16 = WeightForm("int4", 32), WeightForm("bf16")
H200 = Gpu(0, "an H200", (9, 0), 132, 232448)
A100 = Gpu(1, "an A100", (8, 0), 108, 166912)
B200 = Gpu(0, "a B200", (10, 0), 148, 232448)
COUNTS = (1, 15, 16, 17, 64, 65, 4096)


class StandIn:
    """Computes nothing and remembers how it was made and called."""

    def __init__(self, name: str, log: list[tuple[Any, ...]], made_of: tuple[Any, ...]) -> None:
        self.name, self.log = name, log
        log.append((name, "made", *made_of))

    def run(self, *tensors: torch.Tensor, pairs: torch.Tensor | None = None, resume: bool = False) -> None:
        self.log.append((self.name, "run", tensors, pairs, resume))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was made and called, with stand-ins for all three backends on an H200."""
    entries: list[tuple[Any, ...]] = []
    for name, kind in (("fused", "FusedExperts"), ("gemm", "GemmExperts"), ("grouped", "GroupedExperts")):
        monkeypatch.setattr(dispatch, kind, lambda *made_of, name=name: StandIn(name, entries, made_of))
    monkeypatch.setattr(dispatch, "current_gpu", lambda: H200)
    return entries


def measured(*ranges: tuple[int | None, str], form: str = "int4") -> DispatchTable:
    return DispatchTable(
        (DispatchEntry(64, 96, 8, 2, form, tuple(TokenRange(end, backend) for end, backend in ranges)),)
    )


def chosen(kernels: ExpertKernels) -> list[str]:
    return [kernels.backend(count) for count in COUNTS]


@pytest.mark.parametrize(
    ("gpu", "wanted"),
    [
        (H200, ["fused"] * 3 + ["gemm"] * 4),
        (A100, ["fused"] * 3 + ["grouped"] * 4),
        (B200, ["fused"] * 3 + ["grouped"] * 4),  # wgmma is an instruction of compute capability 9.0 alone
    ],
    ids=lambda value: value.name if isinstance(value, Gpu) else "",
)
@pytest.mark.parametrize("table", [None, DispatchTable(), measured((None, "grouped"), form="int8")])
@pytest.mark.usefixtures("log")
def test_what_was_not_measured_follows_the_rule(
    monkeypatch: pytest.MonkeyPatch, gpu: Gpu, wanted: Sequence[str], table: DispatchTable | None
) -> None:
    monkeypatch.setattr(dispatch, "current_gpu", lambda: gpu)
    assert chosen(ExpertKernels(SlotLayout(SHAPE, INT4), 8, 4096, table)) == wanted


@pytest.mark.usefixtures("log")
def test_what_was_measured_decides() -> None:
    layout = SlotLayout(SHAPE, INT4)
    table = measured((64, "fused"), (1024, "grouped"), (None, "gemm"))
    assert chosen(ExpertKernels(layout, 8, 4096, table)) == ["fused"] * 5 + ["grouped", "gemm"]
    assert chosen(ExpertKernels(layout, 8, 4096, measured((None, "gemm")))) == ["gemm"] * 7
    assert chosen(ExpertKernels(layout, 8, 4096, measured((None, "fused")))) == ["fused"] * 7
    assert chosen(ExpertKernels(SlotLayout(SHAPE, BF16), 8, 4096, table)) == ["fused"] * 3 + ["gemm"] * 4


@pytest.mark.parametrize(
    ("gpu", "table", "wanted"),
    [
        (A100, measured((16, "fused"), (None, "gemm")), ["fused"] * 3 + ["grouped"] * 4),
        (A100, measured((None, "gemm")), ["fused"] * 3 + ["grouped"] * 4),
        (H200, measured((64, "fused"), (None, "loop")), ["fused"] * 5 + ["gemm"] * 2),
        (H200, measured((None, "loop")), ["fused"] * 3 + ["gemm"] * 4),
        (H200, measured((None, "grouped")), ["fused"] * 3 + ["grouped"] * 4),  # its rows depend on their batch
    ],
)
@pytest.mark.usefixtures("log")
def test_a_measured_backend_that_will_not_do_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, gpu: Gpu, table: DispatchTable, wanted: Sequence[str]
) -> None:
    monkeypatch.setattr(dispatch, "current_gpu", lambda: gpu)
    assert chosen(ExpertKernels(SlotLayout(SHAPE, INT4), 8, 4096, table)) == wanted


@pytest.mark.parametrize("gpu", [H200, A100], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(
    "table", [None, measured((16, "gemm"), (None, "grouped")), measured((16, "grouped"), (None, "loop"))]
)
@pytest.mark.usefixtures("log")
def test_one_backend_up_to_the_verification_width(
    monkeypatch: pytest.MonkeyPatch, gpu: Gpu, table: DispatchTable | None
) -> None:
    monkeypatch.setattr(dispatch, "current_gpu", lambda: gpu)
    kernels = ExpertKernels(SlotLayout(SHAPE, INT4), 8, 4096, table)
    names = {kernels.backend(count) for count in range(1, INVARIANT_TOKENS + 1)}
    assert len(names) == 1 and names <= {"fused", "gemm"}


@pytest.mark.usefixtures("log")
def test_pools_interleaved_for_the_fused_kernel_are_read_by_no_other() -> None:
    config, table = FusedConfig(experts_per_block=8), measured((64, "fused"), (None, "gemm"))
    assert chosen(ExpertKernels(SlotLayout(SHAPE, INT4), 8, 4096, table, config)) == ["fused"] * 7
    plain = ExpertKernels(SlotLayout(SHAPE, BF16), 8, 4096, None, config)  # BF16 slots are contiguous always
    assert chosen(plain) == ["fused"] * 3 + ["gemm"] * 4


@pytest.mark.usefixtures("log")
def test_more_slots_than_the_library_takes_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "current_gpu", lambda: A100)
    many = MAX_GROUPS + 1
    assert ExpertKernels(SlotLayout(SHAPE, BF16), many, 64).backend(64) == "fused"
    assert (
        ExpertKernels(SlotLayout(SHAPE, INT4), many, 64).backend(64) == "grouped"
    )  # it has a slot an expert of its own
    assert ExpertKernels(SlotLayout(ExpertShape(many, 2, 64, 96), INT4), 8, 64).backend(64) == "fused"


def call(kernels: ExpertKernels, tokens: int, **passes: Any) -> tuple[torch.Tensor, ...]:
    tensors = (
        torch.empty(8, 4096),
        torch.empty(8),
        torch.empty(tokens, 64),
        torch.empty(tokens, 2),
        torch.empty(tokens, 2),
        torch.empty(tokens, 64),
    )
    kernels.run(*tensors, **passes)
    return tensors


def test_backends_are_made_once_and_when_they_are_needed(log: list[tuple[Any, ...]]) -> None:
    layout, config = SlotLayout(SHAPE, INT4), FusedConfig(k_split=2)
    kernels = ExpertKernels(layout, 9, 300, measured((32, "fused"), (128, "gemm"), (None, "grouped")), config)
    assert not log
    for tokens in (1, 32, 33, 16, 128, 129, 300):
        call(kernels, tokens)
    device = torch.device("cuda", 0)
    assert [entry for entry in log if entry[1] == "made"] == [
        ("fused", "made", layout, config, False),
        ("gemm", "made", layout, 300, device),
        ("grouped", "made", layout, 300, 9, device),
    ]
    assert [entry[0] for entry in log if entry[1] == "run"] == [
        "fused", "fused", "gemm", "fused", "gemm", "grouped", "grouped",
    ]  # fmt: skip


def test_tensors_and_passes_are_handed_on(log: list[tuple[Any, ...]]) -> None:
    kernels = ExpertKernels(SlotLayout(SHAPE, INT4), 8, 64)
    for tokens in (3, 40):
        pairs = torch.empty(tokens, 2, 64)
        for passes in ({}, {"pairs": pairs}, {"pairs": pairs, "resume": True}):
            tensors = call(kernels, tokens, **passes)
            _, _, found, found_pairs, resume = log[-1]
            assert all(a is b for a, b in zip(found, tensors, strict=True))
            assert found_pairs is passes.get("pairs") and resume is passes.get("resume", False)


def test_no_tokens_make_no_call(log: list[tuple[Any, ...]]) -> None:
    call(ExpertKernels(SlotLayout(SHAPE, INT4), 8, 64), 0)
    assert not log


@pytest.mark.parametrize(
    ("tokens", "passes", "message"),
    [
        (65, {}, "at most 64 tokens; found 65"),
        (3, {"resume": True}, "pairs to resume from"),
        (0, {"resume": True}, "pairs"),
    ],
)
def test_calls_that_cannot_be_are_refused(
    log: list[tuple[Any, ...]], tokens: int, passes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        call(ExpertKernels(SlotLayout(SHAPE, INT4), 8, 64), tokens, **passes)
    assert not log


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(KernelError, match="an NVIDIA GPU"):
        ExpertKernels(SlotLayout(SHAPE, INT4), 8, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [INT4, BF16], ids=str)
def test_backends_agree_on_both_sides_of_the_border(form: WeightForm) -> None:
    """What a token gets from the kernels for few and for many differs by roundings only."""
    layout = SlotLayout(ExpertShape(8, 2, 136, 96), form)
    pool, slot_of = make_pool(layout, 9, (3,), "cuda")
    kernels = ExpertKernels(layout, 9, 40)
    tokens = make_tokens(layout.shape, 40, "cuda")
    experts = slot_experts(layout, pool, slot_of.tolist(), rounded=True)
    stages = compute_torch(*tokens, experts, layout.shape.activation, LIBRARY)  # the roundings of all backends and more
    assert kernels.backend(16) != kernels.backend(40)
    for count in (16, 40):
        x, top_k_index, top_k_weights = (tensor[:count].contiguous() for tensor in tokens)
        y = torch.full_like(x, torch.nan)
        kernels.run(pool, slot_of, x, top_k_index, top_k_weights, y)
        assert ((y.double() - stages.y[:count]).abs() <= 2 * error_bound(stages)[:count]).all()
