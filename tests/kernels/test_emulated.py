"""The kernels for few tokens without a GPU: right under any schedule, any residency and any timing of their copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.kernels.shape import Activation, ExpertShape, WeightForm
from tests.kernels import emulated
from tests.kernels.emulated_layers import FEW_ROLES_BYTES, SHAPE, Layer

CASES: dict[str, tuple[ExpertShape, WeightForm, int, int, bool]] = {
    "int4": (SHAPE, WeightForm("int4", 128), 8, 900, False),
    "int4-g32": (ExpertShape(5, 5, 64, 40), WeightForm("int4", 32), 8, 900, False),
    "int4-sm80": (SHAPE, WeightForm("int4", 64), 8, 800, False),
    "int8-16": (SHAPE, WeightForm("int8", -1), 16, 900, False),
    "bf16-bias": (ExpertShape(4, 2, 264, 136, Activation.clamped, True), WeightForm("bf16"), 8, 900, False),
    "one-expert": (ExpertShape(1, 1, 128, 64, Activation.gelu_tanh), WeightForm("int4", 128), 8, 900, False),
    "roles": (SHAPE, WeightForm("int4", 128), 8, 900, True),
    "roles-16": (ExpertShape(4, 2, 96, 1672, Activation.clamped, True), WeightForm("int4", 32), 16, 900, True),
    "roles-narrow": (ExpertShape(5, 5, 8, 136), WeightForm("int4", 64), 8, 900, True),  # blocks without rows
    "roles-wide": (ExpertShape(4, 2, 2304, 24, Activation.gelu), WeightForm("int8", -1), 8, 900, True),
    "roles-bf16": (ExpertShape(4, 2, 1024, 256, Activation.clamped, True), WeightForm("bf16"), 8, 900, True),
    "roles-bf16-ragged": (ExpertShape(5, 3, 1152, 640), WeightForm("bf16"), 8, 900, True),  # nine units, and five
    "roles-wide-long": (ExpertShape(3, 2, 2056, 392), WeightForm("int4", 128), 8, 900, True),  # h in shared memory
}


@pytest.fixture(params=CASES, scope="module")
def layer(request: pytest.FixtureRequest, folder: Path) -> Layer:
    shape, form, max_tokens, arch, roles = CASES[request.param]
    return Layer(folder, shape, form, max_tokens, arch, roles=roles)


def test_computes_the_layer_with_one_block_resident(layer: Layer) -> None:
    """What would hang if a block waited for one that has not started."""
    tokens = min(9, int(layer.defines["MAX_TOKENS"]) - 1)
    batch = layer.batch(tokens)
    y = layer.run(*batch, grid=3, resident=1)
    assert layer.error(y[0], *(t[0] for t in batch)) < 3e-3


def test_bits_depend_on_no_schedule(layer: Layer) -> None:
    batch = layer.batch(3)
    y = layer.run(*batch, seed=1)
    for seed, copies, grid, first_claim in (
        (2, emulated.LATE, 1, 1),
        (3, emulated.AT_ONCE, 5, 2),
        (4, emulated.RANDOM, 2, 1),
    ):
        again = layer.run(
            *batch, seed=seed, copies=copies, grid=grid, first_claim=min(first_claim, layer.most_first_claim)
        )
        assert torch.equal(again, y)


def test_a_row_has_the_same_bits_alone_and_in_any_place(layer: Layer) -> None:
    tokens = min(7, int(layer.defines["MAX_TOKENS"]))  # with five experts each, more pairs than one warp lists
    x, index, weights = layer.batch(tokens)
    y = layer.run(x, index, weights)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
    shuffled = layer.run(*(t[:, order].contiguous() for t in (x, index, weights)))
    assert torch.equal(shuffled, y[:, order])
    alone = layer.run(*(t[:, 2:3].contiguous() for t in (x, index, weights)))
    assert torch.equal(alone[0, 0], y[0, 2])


def test_two_passes_end_with_the_bits_of_one(layer: Layer) -> None:
    x, index, weights = layer.batch(4)
    y = layer.run(x, index, weights)
    pairs = torch.full((4, layer.shape.top_k, layer.shape.hidden_size), float("nan"))
    here = torch.arange(layer.shape.num_experts) % 2 == 0
    absent = torch.full_like(layer.slot_of, -1)
    layer.run(x, index, weights, slot_of=torch.where(here, layer.slot_of, absent), pairs=pairs)
    rest = torch.where(here, absent, layer.slot_of)
    assert torch.equal(layer.run(x, index, weights, slot_of=rest, pairs=pairs, resume=True), y)


def test_calls_follow_each_other_in_the_same_scratch(layer: Layer) -> None:
    """The claims start anew and the other buffer of h is refilled by each call."""
    state = torch.zeros(1, 2, dtype=torch.int32)
    h = torch.full((1, 2, layer.kernel.max_pairs, layer.shape.moe_intermediate_size), -1, dtype=torch.int16)
    for call, tokens in enumerate((1, 4, 2, 3)):
        batch = layer.batch(tokens, seed=call)
        y = layer.run(*batch, state=state, h=h, seed=call)
        assert layer.error(y[0], *(t[0] for t in batch)) < 3e-3
    assert int(state[0, 0]) == 0  # four calls: the parity is back, and nothing is left claimed


def test_reads_nothing_before_the_kernel_ahead_has_ended(layer: Layer) -> None:
    batch = layer.batch(2, seed=3)
    y = layer.run(*batch, grid=1)
    pairs = torch.zeros(2, layer.shape.top_k, layer.shape.hidden_size)
    layer.run(*batch, grid=1, pairs=pairs)
    absent = torch.where(layer.slot_of == layer.slot_of[batch[1][0, 0, 0]], -1, layer.slot_of)
    for seed in range(3):
        assert torch.equal(layer.run(*batch, grid=1, seed=seed, late=True), y)
        resumed = layer.run(*batch, grid=1, seed=seed, late=True, slot_of=absent, pairs=pairs, resume=True)
        assert torch.equal(resumed, y)


def test_a_token_that_is_no_number_spoils_no_other(layer: Layer) -> None:
    """Not the one ahead of it either, whose last unit may end behind its values."""
    x, index, weights = layer.batch(3, seed=5)
    y = layer.run(x, index, weights)
    x[0, 1] = float("nan")
    spoilt = layer.run(x, index, weights)
    assert spoilt[0, 1].isnan().all()
    assert torch.equal(spoilt[0, ::2], y[0, ::2])


@pytest.mark.parametrize("roles", [False, True])
@pytest.mark.parametrize("top_k", [2, 9, 33, 65])
def test_any_number_of_choices(folder: Path, top_k: int, roles: bool) -> None:
    """Of a warp's lanes each has one for a row at a time: several rows at once, or a row in several turns."""
    layer = Layer(
        folder, ExpertShape(top_k + 1, top_k, 24, 16, Activation.silu, True), WeightForm("int4", 128), roles=roles
    )
    tokens = min(2, layer.kernel.max_pairs // top_k)
    x, index, weights = layer.batch(tokens)
    pairs = torch.full((tokens, top_k, 24), float("nan"))
    y = layer.run(x, index, weights, pairs=pairs)
    assert layer.error(y[0], x[0], index[0], weights[0]) < 3e-3
    none = torch.full_like(layer.slot_of, -1)
    assert torch.equal(layer.run(x, index, weights, slot_of=none, pairs=pairs, resume=True), y)
    weighted = (weights[0, ..., None] * pairs).sum(1) - weights[0, :, -1:] * pairs[:, -1]
    pairs[:, -1] = -weighted / weights[0, :, -1:]  # all but nothing is left, in which the order shows
    y = layer.run(x, index, weights, slot_of=none, pairs=pairs, resume=True)
    summed = torch.zeros(tokens, 24)
    for choice in range(top_k):  # product and sum are rounded once
        summed = (weights[0, :, choice, None].double() * pairs[:, choice].double() + summed.double()).float()
    assert torch.equal(y[0], summed.bfloat16())


def test_two_stages_are_enough(folder: Path) -> None:
    """As in BF16 for 16 tokens on an H200: each stage's note is read right after it was written."""
    layer = Layer(folder, SHAPE, WeightForm("bf16"), stages=2)
    batch = layer.batch(3)
    for seed in range(4):
        y = layer.run(*batch, grid=3, resident=2, seed=seed)
        assert layer.error(y[0], *(t[0] for t in batch)) < 3e-3


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_down_may_wait_for_the_tiles_of_a_warp(folder: Path, stages: int) -> None:
    """Held or not, the bits are the same; with more blocks than tiles, too, and with blocks without rows."""
    shape = ExpertShape(5, 2, 152, 200)
    at_once, held = (
        Layer(folder, shape, WeightForm("bf16"), stages=stages, more={"FEW_TILES": few}) for few in (0, 1000)
    )
    for seed, tokens in enumerate((1, 3, 8)):
        batch = at_once.batch(tokens, seed)
        y = at_once.run(*batch)
        assert at_once.error(y[0], *(t[0] for t in batch)) < 3e-3
        for grid in (1, 3, 16):
            assert torch.equal(held.run(*batch, grid=grid, resident=min(grid, 3), seed=seed), y)


@pytest.mark.parametrize(
    "shape", [ExpertShape(5, 3, 1152, 640), ExpertShape(9, 2, 1024, 1152), ExpertShape(3, 1, 1024, 128)]
)
def test_bf16_by_warps_with_roles_has_the_bits_of_warps_that_are_alike(folder: Path, shape: ExpertShape) -> None:
    alike = Layer(folder, shape, WeightForm("bf16"), block_dim=512)
    roles = Layer(folder, shape, WeightForm("bf16"), roles=True)
    assert [alike.defines[name] for name in ("TEAM", "PARTS")] == [roles.defines[name] for name in ("TEAM", "PARTS")]
    for seed, tokens in enumerate((1, 8, 5)):
        batch = alike.batch(tokens, seed)
        y = alike.run(*batch, grid=3)
        assert torch.equal(roles.run(*batch, grid=3, resident=2, seed=seed, first_claim=1 + seed % 2), y)
    batch = alike.batch(1)  # blocks without rows, and a team without entries in the last shape
    assert torch.equal(roles.run(*batch, grid=66, resident=3), alike.run(*batch, grid=3))


def test_bf16_by_warps_with_roles_in_fewer_stages_than_an_entry_has(folder: Path) -> None:
    """And with experts that are not here, so that some warps have no entry."""
    layer = Layer(folder, ExpertShape(6, 3, 1024, 1152), WeightForm("bf16"), roles=True, smem_bytes=150 << 10)
    assert layer.defines["STAGES"] == 2
    for seed, tokens in enumerate((1, 4)):
        batch = layer.batch(tokens, seed)
        y = layer.run(*batch, grid=3, resident=2, seed=seed)
        assert layer.error(y[0], *(t[0] for t in batch)) < 3e-3
        pairs = torch.full((tokens, 3, 1024), float("nan"))
        here = torch.arange(6) % 2 == 0
        absent = torch.full_like(layer.slot_of, -1)
        layer.run(*batch, slot_of=torch.where(here, layer.slot_of, absent), pairs=pairs, copies=emulated.LATE)
        rest = torch.where(here, absent, layer.slot_of)
        assert torch.equal(layer.run(*batch, slot_of=rest, pairs=pairs, resume=True, seed=seed), y)


@pytest.mark.parametrize(
    ("inner", "compute", "at_once"),
    [
        (392, 16, 4),
        (392, 8, 4),
        (392, 8, 1),
        (120, 16, 4),
    ],  # a thread has one piece of h, two at once or in turn; one unit
)
def test_a_single_wide_token_has_the_bits_that_it_has_among_others(
    folder: Path, inner: int, compute: int, at_once: int
) -> None:
    """Its h lies in shared memory; each team has several entries."""
    smem_bytes = 232448 if compute == 16 else FEW_ROLES_BYTES
    shape, more = ExpertShape(8, 6, 2304, inner), {"H_AT_ONCE": at_once}
    layer = Layer(folder, shape, WeightForm("int4", 128), roles=True, smem_bytes=smem_bytes, more=more)
    assert layer.defines["COMPUTE"] == compute
    x, index, weights = layer.batch(2)
    y = layer.run(x, index, weights, grid=3)
    assert layer.error(y[0], x[0], index[0], weights[0]) < 3e-3
    for row, grid, resident in ((0, 1, 1), (0, 3, 3), (1, 5, 2)):
        alone = tuple(t[:, row : row + 1].contiguous() for t in (x, index, weights))
        got = layer.run(*alone, grid=grid, resident=resident, seed=row, copies=emulated.LATE)
        assert torch.equal(got[0, 0], y[0, row])


MORE_BLOCKS: dict[str, tuple[WeightForm, bool, tuple[str, str] | None]] = {
    "int4 roles": (WeightForm("int4", 128), True, None),
    "bf16": (WeightForm("bf16"), False, None),
    "bf16 roles": (WeightForm("bf16"), True, None),
    "waits": (WeightForm("bf16"), True, ("    if (blockIdx.x < TILES2 && team < num_active)\n", "")),
}


@pytest.mark.parametrize("kind", MORE_BLOCKS)
def test_more_blocks_than_rows_all_at_once(folder: Path, kind: str) -> None:
    """As 132 processors compute a hidden size of 2048: some blocks have tiles of gate and up, but no rows of down."""
    form, roles, edit = MORE_BLOCKS[kind]
    layer = Layer(
        folder, ExpertShape(5, 3, 1024, 256), form, roles=roles, block_dim=512, more={"FEW_TILES": 3}, edit=edit
    )
    batch = layer.batch(1)
    if edit is not None:
        with pytest.raises(AssertionError, match="no thread gets on"):
            layer.run(*batch, grid=68)
        return
    y = layer.run(*batch, grid=68)
    assert layer.error(y[0], *(t[0] for t in batch)) < 3e-3
    assert torch.equal(layer.run(*batch, grid=2), y)


@pytest.mark.parametrize("experts", [60, 129])  # slots that come with the choices, and slots that are looked up
def test_one_warp_lists_any_of_many_experts(folder: Path, experts: int) -> None:
    layer = Layer(folder, ExpertShape(experts, 4, 16, 8), WeightForm("int4", 128), roles=True)
    for tokens in (8, 3):
        x, index, weights = layer.batch(tokens, seed=tokens)
        index = (index - index[0, 0, 2] + experts - 1) % experts  # the last one is among them
        absent = torch.zeros(experts, dtype=torch.bool)
        absent[index[0, 0, :2].long()] = True
        y = layer.run(x, index, weights, slot_of=torch.where(absent, -1, layer.slot_of))
        weights = torch.where(absent[index.long()], 0.0, weights)
        assert layer.error(y[0], x[0], index[0], weights[0]) < 3e-3


@pytest.mark.parametrize("roles", [False, True])
def test_two_calls_side_by_side_end(folder: Path, roles: bool) -> None:
    layer = Layer(folder, SHAPE, WeightForm("int4", 128), roles=roles)
    first, second = layer.batch(2, seed=1), layer.batch(2, seed=2)
    both = tuple(torch.cat(pair).contiguous() for pair in zip(first, second, strict=True))
    y = layer.run(*both, grid=2, resident=1)
    for call, batch in enumerate((first, second)):
        assert layer.error(y[call], *(t[0] for t in batch)) < 3e-3
