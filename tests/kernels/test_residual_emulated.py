"""Residual records by the GPU kernels' own source on the host: every bit back, and hostile records go nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from moespeq_cli.bench.kernel_residual import ExactExperts
from tests.kernels.emulated import fenced
from tests.kernels.emulated_residual import Machine
from tests.kernels.residual_cases import SHAPES, every_word, hostile, wild


@pytest.mark.parametrize(("name", "share"), [("odd", 0.0), ("odd", 0.5), ("g32", 0.01)])
def test_every_bit_comes_back(name: str, share: float, folder: Path) -> None:
    shape, form = SHAPES[name]
    require_exact(wild(ExactExperts.random(shape, form, shape.num_experts, seed=3), share, seed=5), folder)


def test_every_word_under_every_code(folder: Path) -> None:
    require_exact(every_word(), folder)


def require_exact(experts: ExactExperts, folder: Path) -> None:
    machine = Machine(experts, folder)
    records = experts.records()
    slots = experts.slots(records)
    directory, faults = machine.admit(slots, [len(record) for record in records])
    assert not faults.any()
    assert torch.equal(machine.decode(slots, directory), experts.exact())


def test_hostile_records_are_known_and_lead_nowhere(folder: Path) -> None:
    """Each in memory of its own whose neighbours cannot be touched, in a process that may die."""
    experts, slots, length, changed = hostile(24)
    machine = Machine(experts, folder, count=1)
    for slot, known in zip(slots, changed.tolist(), strict=True):
        child = os.fork()
        if child == 0:
            directory, faults = machine.admit(fenced(slot[None]), [length])
            machine.decode(fenced(slot[None]), directory)
            os._exit(10 + int(faults[0] > 0))
        status = os.waitpid(child, 0)[1]
        assert os.waitstatus_to_exitcode(status) in ((11,) if known else (10, 11))
