"""quantize and profile with layers on a device that refuses tensors from elsewhere, as a GPU does, without one."""

from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path

import pytest
import torch

from moespeq_cli.profile.build import build as make_profile
from moespeq_cli.quantize import build, layer
from moespeq_cli.quantize.plan import QuantizeOptions
from runtime.artifacts.profile import Profile
from tests.pretended import pretended_device
from tests.profile.test_device import device_job, require_alike
from tests.quantize.conftest import LINES
from tests.tiny import save_tiny

PROFILED = "deepseek_v3"  # a dense layer, latent attention and shared experts
QUANTIZED = "gpt_oss"  # biases and windows
ROUTED = {"expert_up", "expert_down", "lm_head"}  # the probe puts other classes' weights in by a way past the pretence


def quantize(place: Path, kind: str, out: str, device: torch.device | None = None) -> Path:
    """With a sensitive layer, and what it bought."""
    text = place / "text.jsonl"
    text.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    options = QuantizeOptions(
        str(place / kind), place / out / kind, text, seq_len=48, min_tokens=4, sensitive_layers=(1,), device="cpu"
    )
    work = build.prepare(options)
    build.quantize(options, work=work if device is None else dataclasses.replace(work, device=device))
    return options.out


def compute_there(place: Path) -> None:
    """In a process of its own: torch does not forget a device."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, pretended_device() as device:
        patch.setattr("moespeq_cli.profile.pictures.available", lambda: False)
        patch.setattr(layer, "working_bytes", lambda _: layer.WORKING_BYTES)
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2, 3, device=device) @ torch.ones(3, 2)
        quantize(place, QUANTIZED, "there", device)
        make_profile(device_job(place / PROFILED, place / "here" / PROFILED, device), place / "there" / "profile")


def test_a_layer_is_all_on_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moespeq_cli.profile.pictures.available", lambda: False)
    for kind in (PROFILED, QUANTIZED):
        save_tiny(kind, tmp_path / kind, dtype=torch.bfloat16)
        quantize(tmp_path, kind, "here")
    process = multiprocessing.get_context("spawn").Process(target=compute_there, args=(tmp_path,))
    process.start()
    here = make_profile(device_job(tmp_path / PROFILED, tmp_path / "here" / PROFILED), tmp_path / "here" / "profile")
    process.join(300)
    assert process.exitcode == 0
    for path in sorted((tmp_path / "here" / QUANTIZED).glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "there" / QUANTIZED / path.name).read_bytes(), path.name
    there = Profile.open(tmp_path / "there" / "profile", verify=True)
    require_alike(here, there, ROUTED)
    assert (here.manifest.settings["device"], there.manifest.settings["device"]) == ("cpu", "pretended")
