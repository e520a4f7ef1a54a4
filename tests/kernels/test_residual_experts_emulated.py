"""The kernel for few tokens of residual records on the host: the bits of the BF16 kernel, under any schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moespeq_cli.bench.kernel_residual import ExactExperts
from runtime.kernels import fused_plan, residual_plan
from runtime.kernels.dequant import plain_layout
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.shape import Activation, ExpertShape, WeightForm
from tests.kernels import emulated
from tests.kernels.emulated import pointer
from tests.kernels.emulated_residual import Machine
from tests.kernels.residual_cases import with_exceptions, with_scales_of_any_size, with_turned_groups

SMEM_BYTES = 232448  # of a block of an H200
SHORT_BYTES = 101376  # a ring of two to three stages
SHAPE = ExpertShape(3, 3, 1032, 392, Activation.clamped, True)  # 8 warps a tile, 4 parts of down, 1 unit too many
TURNS = ExpertShape(5, 2, 400, 1160, Activation.silu, False)  # 4 warps a tile, 8 parts: groups in turn in phase 1
SHORT = ExpertShape(3, 3, 256, 256, Activation.silu, False)  # 2 warps a tile, 2 parts: many stages in a ring
MEET = ExpertShape(4, 4, 128, 256, Activation.silu, False)  # 1 warp a tile: the phases meet with most stages out
FORM, TOKENS = WeightForm("int4", -1), 16


class Both:
    """A layer for the BF16 kernel and as residual records, expert e's record in a slot of its own order."""

    def __init__(
        self,
        folder: Path,
        smem_bytes: int = SMEM_BYTES,
        share: float = 1e-2,
        shape: ExpertShape = SHAPE,
        tokens: int = TOKENS,
        short_scales: bool = False,
        odd_scales: bool = True,
        edit: tuple[str, str] | None = None,
    ) -> None:
        config = FusedConfig()
        self.shape = shape
        experts = ExactExperts.random(shape, FORM, shape.num_experts, seed=2, short_scales=short_scales)
        if short_scales:
            experts = with_turned_groups(with_scales_of_any_size(experts, seed=3), 0.3, seed=5)
        experts = with_exceptions(experts, share, seed=4, scales=odd_scales)
        plain = plain_layout(experts.layout)
        chosen = fused_plan.plan(plain, tokens, config, smem_bytes)
        self.plain = emulated.build(plain, dict(chosen.source.defines), folder)
        assert experts.layout.has_short_scales(experts.bank()) == short_scales
        chosen = residual_plan.plan(experts.layout, tokens, config, smem_bytes, short_scales)
        defines = self.defines = dict(chosen.source.defines)
        self.max_tokens = chosen.max_tokens
        self.kernel = emulated.build(experts.layout, defines, folder, source="moe_residual.cu", edit=edit)
        assert self.kernel.library.shared_bytes() == chosen.smem_bytes
        self.exact, self.machine = experts.exact(), Machine(experts, folder)
        records = experts.records()
        self.slots = emulated.fenced(experts.slots(records))
        directory, faults = self.machine.admit(self.slots, [len(record) for record in records])
        assert not faults.any()
        self.directory = emulated.fenced(directory)
        self.own = torch.arange(shape.num_experts, dtype=torch.int32)

    def batch(self, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """x [1, M, H], top_k_index and top_k_weights [1, M, k]."""
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(1, tokens, self.shape.hidden_size, generator=random).bfloat16()
        chosen = torch.rand(tokens, self.shape.num_experts, generator=random).topk(self.shape.top_k)
        return x, chosen.indices[None].int(), torch.rand(1, tokens, self.shape.top_k, generator=random)

    def run(
        self, *batch: Tensor, record_of: Tensor | None = None, bank_of: Tensor | None = None, **options: Any
    ) -> Tensor:
        self.record_of = self.own if record_of is None else record_of  # the library keeps its address
        addresses = [pointer(tensor) for tensor in (self.record_of, self.slots)]
        size = emulated.ctypes.c_ulonglong(self.slots.shape[1])
        self.kernel.library.set_records(*addresses, size, pointer(self.directory))
        return self.kernel.run(self.machine.bank, self.own if bank_of is None else bank_of, *batch, **options)

    def run_plain(self, *batch: Tensor, **options: Any) -> Tensor:
        return self.plain.run(self.exact, self.own, *batch, **options)


@pytest.fixture(scope="module", params=[False, True], ids=["any", "short"])
def both(folder: Path, request: pytest.FixtureRequest) -> Both:
    return Both(folder, short_scales=request.param)


def test_has_the_bits_of_bf16_under_any_schedule(both: Both) -> None:
    batch = both.batch(9)
    right = both.run_plain(*batch)
    assert right.isfinite().all()
    for seed, copies, grid, resident in ((1, emulated.RANDOM, 3, 1), (2, emulated.LATE, 2, 2)):
        assert torch.equal(both.run(*batch, seed=seed, copies=copies, grid=grid, resident=resident), right)


FAR_FAULTS = {
    "none": None,
    "not noted": ("note = count | (u32)far << 31;", "note = count;"),
    "not looked at": ("(int)(entry.counts | note.what) < 0", "(int)entry.counts < 0"),
}


@pytest.mark.parametrize("fault", FAR_FAULTS)
def test_a_short_ring_is_used_again_only_when_it_was_read(folder: Path, fault: str) -> None:
    """With more exceptions than a stage has room for, which stay in global memory."""
    both = Both(folder, SHORT_BYTES, share=0.4, odd_scales=False, edit=FAR_FAULTS[fault])
    assert both.defines["PRODUCERS"] == 1
    batch = both.batch(3, seed=3)
    right = both.run_plain(*batch)
    assert torch.equal(both.run(*batch, seed=3, copies=emulated.LATE, resident=1), right) == (fault == "none")


def test_units_with_negative_scales_and_no_exceptions_go_by_weight(folder: Path) -> None:
    """The groups that `with_turned_groups` turns; a test for exceptions instead is found."""
    slow = ("(by_weight(entry) || exceptions(entry))", "exceptions(entry)")
    for edit in (None, slow):
        both = Both(folder, share=0.0, shape=SHORT, short_scales=True, edit=edit)
        batch = both.batch(3, seed=3)
        assert torch.equal(both.run(*batch, seed=3, copies=emulated.LATE), both.run_plain(*batch)) == (edit is None)


@pytest.mark.parametrize("smem_bytes", [SMEM_BYTES, SHORT_BYTES])
def test_groups_that_take_turns_have_the_bits_of_bf16(folder: Path, smem_bytes: int) -> None:
    both = Both(folder, smem_bytes, shape=TURNS)
    assert [both.defines[name] for name in ("TEAM", "PARTS")] == [4, 8]
    for tokens in (1, min(7, both.max_tokens)):
        batch = both.batch(tokens, seed=tokens)
        right = both.run_plain(*batch)
        for copies, grid in ((emulated.RANDOM, 3), (emulated.LATE, 1)):
            assert torch.equal(both.run(*batch, seed=tokens, copies=copies, grid=grid, resident=1), right)


def test_stages_may_come_in_any_order(folder: Path) -> None:
    """Where the phases meet, a group may wait for a place whose last stage, another group's, is still on its way.

    One stage less between what a producer has under way and the places that it has, and some of these end otherwise.
    """
    ahead = "#define AHEAD ((TURNS1 - 1) * STAGES1 + TURNS2"
    for edit in (None, (f"{ahead}) ", f"{ahead} - 1) ")):
        both = Both(folder, shape=MEET, tokens=1, edit=edit)
        batch = both.batch(1, seed=5)
        right, wrong = both.run_plain(*batch), 0
        for seed in range(100020, 100100):
            try:
                y = both.run(*batch, seed=seed, copies=emulated.LATE, grid=1, first_claim=3)
                wrong += not torch.equal(y, right)
            except AssertionError:
                wrong += 1
        assert (wrong == 0) == (edit is None)


def test_reads_nothing_before_the_kernel_ahead_has_ended(both: Both) -> None:
    batch = both.batch(2, seed=3)
    right = both.run_plain(*batch)
    for seed in range(3):
        assert torch.equal(both.run(*batch, grid=1, seed=seed, late=True), right)


def test_passes_end_with_the_bits_of_one_call(both: Both) -> None:
    """An expert is not here where either its record or its codes are not."""
    batch = both.batch(2, seed=1)
    right = both.run_plain(*batch)
    pairs = torch.full((2, both.shape.top_k, both.shape.hidden_size), torch.nan)
    state = torch.zeros(1, 2, dtype=torch.int32)
    inner = both.shape.moe_intermediate_size
    scratch = {"state": state, "h": torch.full((1, 2, both.kernel.max_pairs, inner), -1, dtype=torch.int16)}
    even = both.own % 2 == 0
    both.run(*batch, record_of=torch.where(even, both.own, -1).int(), pairs=pairs, **scratch)
    odd = torch.where(even, -1, both.own).int()
    assert torch.equal(both.run(*batch, bank_of=odd, pairs=pairs, resume=True, **scratch), right)
    assert int(state[0, 0]) == 0  # two calls in the same scratch: nothing is left claimed
