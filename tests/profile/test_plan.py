"""What a profile is said to take, against sizes that can be counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moespeq_cli import estimate
from moespeq_cli.profile.build import ProfileJob
from moespeq_cli.profile.measure import TextSequence
from moespeq_cli.profile.plan import ProfilePlan, estimate_profile
from runtime.artifacts.checkpoint import Checkpoint
from runtime.model.families import describe
from tests import tiny


def job(folder: Path, lengths: list[int], sensitivity_tokens: int) -> ProfileJob:
    checkpoint = Checkpoint.open(folder)
    sequences = [TextSequence("a", torch.zeros(length, dtype=torch.int64)) for length in lengths]
    return ProfileJob(checkpoint, describe(checkpoint), sequences, "t", None, "float32", 0, sensitivity_tokens)


def test_a_backward_pass_costs_memory_a_second_reading_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "PROBE_S", 0.01)
    tiny.save_tiny("qwen2_moe", tmp_path)
    forward, both = (estimate_profile(job(tmp_path, [40] * 200, tokens)) for tokens in (0, 4000))
    assert both.seconds > forward.seconds and both.peak_memory_bytes >= forward.peak_memory_bytes
    assert both.disk_bytes > forward.disk_bytes
    info = Checkpoint.open(tmp_path).tensors
    sizes = {name: i.end - i.start for name, i in info.items()}
    layers = sum(size for name, size in sizes.items() if "embed_tokens" not in name and "lm_head" not in name)
    words = sizes["model.embed_tokens.weight"]
    assert forward.read_bytes == layers + words  # nothing wants the head
    assert both.read_bytes == 2 * layers + 3 * words  # the embedding twice, the head once


def test_more_of_anything_never_takes_less(tmp_path: Path) -> None:
    tiny.save_tiny("mixtral", tmp_path)
    plan = ProfilePlan(job(tmp_path, [40, 30], 70))
    phases = plan.phases()
    assert set(phases) == {"embedding", "forward", "masks", "head", "backward"}
    experts = plan.sizes.expert_weights
    assert phases["backward"] > (4 + 4) * experts + 3 * 4 * plan.sizes.dense_weights  # stored in float32, copies
    longer = ProfilePlan(job(tmp_path, [80, 30], 110)).phases()
    assert all(longer[name] >= size for name, size in phases.items())
    probed = ProfilePlan(replace(plan.job, probe_tokens=70)).phases()
    assert probed["probe"] > phases["forward"]


def test_factors_wait_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save_tiny("mixtral", tmp_path)
    some, many = (ProfilePlan(job(tmp_path, [40] * count, 10_000)) for count in (10, 100))
    unlimited = many.phases()["backward"] - some.phases()["backward"]
    monkeypatch.setattr("moespeq_cli.profile.plan.WAITING_BYTES", 4 * 400 * 2 * 3 * (64 + 96))
    limited = many.phases()["backward"] - some.phases()["backward"]
    hidden = 3 * 4 * 90 * 40 * 64
    assert unlimited > limited >= hidden
