"""Routing, sensitivity and probe with layers on another device: the CPU's figures, but for roundings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moespeq_cli.profile.build import ProfileJob, build
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.profile import Profile
from runtime.artifacts.quantized import Quantized
from runtime.model.families import describe
from runtime.model.stream import CPU
from tests.profile.test_measure import texts


def device_job(model: Path, quantized: Path, device: torch.device = CPU) -> ProfileJob:
    """Routing with a draft, sensitivity and probe."""
    checkpoint = Checkpoint.open(model)
    sequences = [*texts(9, 21, domain="a"), *texts(17, domain="b", seed=1)]
    draft = Quantized.open(quantized)
    return ProfileJob(checkpoint, describe(checkpoint), sequences, "known", draft, "float32", 30, 99, 99, device=device)


def require_alike(here: Profile, there: Profile, probed: set[str]) -> None:
    """Counts are equal, and the rest to rounding; of the probe, the classes named."""
    for name, tensor in here.tensors.items():
        torch.testing.assert_close(there.tensors[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)
    assert here.manifest.draft is not None and there.manifest.draft is not None
    assert there.manifest.draft.greedy == here.manifest.draft.greedy
    assert there.manifest.draft.overlap == pytest.approx(here.manifest.draft.overlap, rel=1e-5)
    ours, theirs = here.sensitivity(), there.sensitivity()
    assert theirs.figures.loss == pytest.approx(ours.figures.loss, rel=1e-5)
    for name, channels in ours.channels.items():
        torch.testing.assert_close(theirs.channels[name], channels, rtol=1e-3, atol=1e-4 * float(channels.max()))
    assert here.manifest.probe is not None and there.manifest.probe is not None
    for row, other in zip(here.manifest.probe.rows, there.manifest.probe.rows, strict=True):
        if row.module_class not in probed:
            continue
        assert other.loss == pytest.approx(row.loss, rel=1e-4) and other.kl == pytest.approx(row.kl, rel=1e-2, abs=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.gpu
def test_on_a_gpu(model: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moespeq_cli.profile.pictures.available", lambda: False)
    here = build(device_job(model, quantized), tmp_path / "here")
    there = build(device_job(model, quantized, torch.device("cuda")), tmp_path / "there")
    require_alike(here, there, {row.module_class for row in here.manifest.probe.rows})
    assert (here.manifest.settings["device"], there.manifest.settings["device"]) == ("cpu", "cuda")
