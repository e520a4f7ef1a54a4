"""Where a run computes, as it is asked for and as the pack allows, with a GPU that is only said to be there."""

from __future__ import annotations

import pytest
import torch

from runtime import opening
from runtime.config import RunSettings
from runtime.errors import InputError, KernelError
from runtime.gpu.parts import Toolkit
from runtime.gpu.plan import plan_gpu
from runtime.kernels import device
from tests.decode.conftest import PackOf
from tests.gpu.stand_in import toolkit

GPU = device.Gpu(0, "a GPU", (9, 0), 132, 200_000)


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a GPU; packs are made before, without it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "current_gpu", lambda: GPU)
    monkeypatch.setattr(opening, "find_spec", lambda name: object())


def test_takes_the_gpu_for_a_pack_that_it_computes(pack_of: PackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    pretend(monkeypatch)
    for name, is_gpu in (("auto", True), ("cuda", True), ("cpu", False)):
        assert opening.choose_device(pack, RunSettings(device=name)).is_gpu == is_gpu


@pytest.mark.parametrize(
    ("kind", "dtype", "why"),
    [("gpt_oss", torch.bfloat16, "attention with sinks"), ("qwen2_moe", torch.float32, "experts in BF16")],
)
def test_auto_leaves_to_the_processor_what_cuda_refuses(
    pack_of: PackOf, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, why: str
) -> None:
    """Before anything is loaded."""
    pack = pack_of(kind, dtype)
    pretend(monkeypatch)
    chosen = opening.choose_device(pack, RunSettings())
    assert not chosen.is_gpu and why in str(chosen.refused)
    assert opening.choose_device(pack, RunSettings(device="cpu")).refused is None
    with pytest.raises(InputError, match=why):
        opening.choose_device(pack, RunSettings(device="cuda"))


def test_without_cupy_auto_takes_the_processor(pack_of: PackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    pretend(monkeypatch)
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    assert not opening.choose_device(pack, RunSettings()).is_gpu
    with pytest.raises(KernelError, match="CuPy") as refused:
        opening.choose_device(pack, RunSettings(device="cuda"))
    assert refused.value.mend == "pip install 'moespeq[cuda]'; or run with --device cpu"


def test_opening_says_how_far_the_experts_are(pack_of: PackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    pack, settings = pack_of("qwen2_moe", torch.bfloat16), RunSettings(context=64)
    plan = plan_gpu(pack, settings, device_bytes=8 * 10**9)
    monkeypatch.setattr(Toolkit, "cuda", lambda settings: toolkit())
    told: list[int] = []
    opening.open_engine(opening.Device("a GPU", True), pack, settings, plan, done=told.append).close()
    assert len(told) == pack.spec.num_records and sum(told) == plan.total_expert_bytes
