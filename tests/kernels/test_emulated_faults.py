"""What the emulation is worth: faults planted in the kernels for few tokens are found."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import pytest
import torch

from runtime.kernels.shape import ExpertShape, WeightForm
from tests.kernels import emulated
from tests.kernels.emulated_layers import SHAPE, Layer

FAULTS = {
    "no wait for the weights": (False, "    copy_wait<STAGES - 1>();", "", "error"),
    "no wait for the weights, roles": (
        True,
        "    barrier_wait(full + at.slot * 8, at.parity);\n    const int2 note",
        "    const int2 note",
        "bytes expected of a phase",
    ),
    "no wait for h": (False, "column.await(b, n);", "", "error"),
    "no wait for a claim": (
        False,
        "    barrier_wait(queued + ordinal % QUEUE * 8, ordinal / QUEUE & 1);\n",
        "",
        "no thread gets on",
    ),
    "h is not refilled": (
        False,
        "i += gridDim.x * THREADS) other[i] = make_uint4(~0u, ~0u, ~0u, ~0u)",
        "i += gridDim.x * THREADS) (void)other",
        "error",
    ),
    "no wait for a single token's h": (True, "} while (!all);", "} while (false);", "error"),
    "no wait for h, roles in bf16": (True, "while (!is_written(hb[k]))", "while (false)", "error"),
    "the tokens of the next entry are those of this one": (
        True,
        "tokens_of(group + 1 < count ? group + 1 : 0)",
        "tokens_of(group)",
        "error",
    ),
    "the last claim is not seen": (False, "*state = ~c & 0x80000000u;", ";", "error"),
    "the first tile by the block's number": (
        False,
        "if (lane == 0) block_claim() = claim;",
        "if (lane == 0) block_claim() = blockIdx.x * args.first_claim;",
        "no thread gets on",
    ),
    "no barrier of the team": (False, "  barrier_of<TEAM * 32>(me.team + 1);\n", "", "error"),
    "no wait for h, roles": (
        True,
        "        await_h(hb[i % 2], (const u16*)from, u * UNIT_K + k0);\n",
        "",
        "error",
    ),
    "the tokens of the next rows stay in the other buffer": (
        True,
        "for (int j = 0; j < B_REGS; j++) hb[0][j] = hb[1][j];",
        "",
        "error",
    ),
    "rows go on while their sums are read, roles": (
        True,
        "  if (rt + (int)gridDim.x < TILES2) barrier_of<COMPUTE * 32>(1);",
        "",
        "error",
    ),
    "rows go on while their sums are read": (
        False,
        "      if (row_tile + (int)gridDim.x < TILES2) __syncthreads();",
        "",
        "error",
    ),
    "a barrier that others expect fewer at": (
        True,
        "    barrier_pass<COUNT>(BARRIER);\n",
        "    barrier_pass<FIRST + COUNT>(BARRIER);\n",
        "different numbers of threads",
    ),
    "one buffer for a team's sums": (False, "(tiles & 1)", "0", "error"),
    "the next call's counting does not start, roles": (
        True,
        "args.state[0] = ~(parity << 31)",
        "args.state[0] = 0 & ~(parity << 31)",
        "error",
    ),
    "a team without entries is not told": (
        True,
        "if (blockIdx.x >= TILES2 || team >= num_active) stage",
        "if (false) stage",
        "no thread gets on",
    ),
}


SHAPES_OF_FAULTS = {
    # a warp has three units of a team's entries, and begins with the first of them again
    "the tokens of the next rows stay in the other buffer": ExpertShape(4, 2, 96, 1160),
    "rows go on while their sums are read": ExpertShape(6, 3, 288, 64),  # warps without units in the next rows
    "no wait for a single token's h": ExpertShape(3, 2, 2056, 24),
}
BF16_FAULTS = {"no wait for h, roles in bf16", "the tokens of the next entry are those of this one"}
TOKENS_OF_FAULTS = {"no wait for a single token's h": 1}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulation_finds(fault: str, folder: Path) -> None:
    """Each fault shows under some schedule, as a wrong result or as a kernel that does not end."""
    roles, old, new, expected = FAULTS[fault]
    form, shape = WeightForm("int4", 128), SHAPES_OF_FAULTS.get(fault, SHAPE)
    if fault in BF16_FAULTS:
        form, shape = WeightForm("bf16"), ExpertShape(5, 3, 1152, 640)
    layer = Layer(folder, shape, form, edit=(old, new), roles=roles)
    state = torch.zeros(1, 2, dtype=torch.int32)
    h = torch.full((1, 2, layer.kernel.max_pairs, shape.moe_intermediate_size), -1, dtype=torch.int16)
    found = ""
    for seed in range(24):
        batch = layer.batch(TOKENS_OF_FAULTS.get(fault, 3), seed=seed)
        slot_of = (
            torch.where(layer.slot_of > 0, -1, layer.slot_of) if "no thread" in expected and roles else layer.slot_of
        )
        try:
            y = layer.run(
                *batch, grid=3, resident=2, seed=seed, copies=emulated.LATE, state=state, h=h, slot_of=slot_of
            )
        except AssertionError as error:
            found = str(error)
            break
        if slot_of is layer.slot_of and not layer.error(y[0], *(t[0] for t in batch)) < 3e-3:
            found = "error"
            break
    assert found, "no schedule showed the fault"
    assert expected in found


SMALL, ROLES = ExpertShape(3, 2, 72, 256), ExpertShape(5, 3, 1152, 640)
PAST_THE_END = {
    "rows of down that are not there": (SMALL, False, "HIDDEN % 16 == 0 || it.tile * 16 + 8 < HIDDEN", "true"),
    "columns of down that are not there": (
        ExpertShape(3, 2, 256, 136),
        False,
        "s.k_end = it.phase == 1 ? HIDDEN : INTER",
        "s.k_end = it.phase == 1 ? HIDDEN : INTER + 8",
    ),
    "tokens that are not there": (SMALL, False, "(column < args.num_tokens ? column : 0) * HIDDEN", "column * HIDDEN"),
    "tokens that are not there, roles": (
        ROLES,
        True,
        "(u64)(column < args.num_tokens ? column : 0) * HIDDEN",
        "(u64)column * HIDDEN",
    ),
    "more of h than there is, roles": (ROLES, True, "i < MAX_PAIRS * INTER / 8", "i < MAX_PAIRS * INTER / 8 + 1"),
}


@pytest.mark.parametrize("fault", PAST_THE_END)
def test_a_place_past_the_end_ends_the_process(fault: str, folder: Path) -> None:
    """Of a pool, whose last slot weights fill, of tokens or of h; in processes that may die."""
    shape, roles, old, new = PAST_THE_END[fault]
    for edit, ends in ((None, 0), ((old, new), -signal.SIGSEGV)):
        layer = Layer(folder, shape, WeightForm("bf16"), edit=edit, roles=roles)
        assert layer.layout.down.end_bytes == layer.layout.slot_bytes or "down" not in fault
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            layer.run(*layer.batch(7))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ends
