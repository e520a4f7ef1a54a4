"""How domains differ: divergence, specialists and serving, against plain loops and known cases."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moespeq_cli.profile import domains
from moespeq_cli.profile.charts_sensitivity import divergence_chart
from runtime.artifacts.profile import Profile
from tests.profile.recorded import LAYERS, NUM_EXPERTS, save_recorded


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return save_recorded(tmp_path_factory.mktemp("domains") / "profile", {"code": [90, 40], "prose": [300]})


def with_counts(profile: Profile, counts: list[list[int]], tokens: dict[str, int]) -> Profile:
    """The same uses in every layer."""
    tensor = torch.tensor(counts)[:, None, :].expand(-1, len(LAYERS), -1).contiguous()
    manifest = replace(profile.manifest, domains=tokens, sequences=dict.fromkeys(tokens, 1))
    return Profile(profile.folder, manifest, {**profile.tensors, "counts": tensor})


def test_divergence_is_zero_for_equal_and_one_for_disjoint_use(profile: Profile) -> None:
    made = with_counts(profile, [[2, 2, 0, 0] * 2, [9, 9, 0, 0] * 2, [0, 0, 3, 1] * 2], {"a": 4, "b": 18, "c": 4})
    found = domains.divergence(made)
    assert torch.allclose(found[0, 1], torch.zeros(3).double(), atol=1e-12)
    assert torch.allclose(found[0, 2], torch.ones(3).double()) and torch.equal(found, found.transpose(0, 1))
    nothing = with_counts(profile, [[1] * 8, [0] * 8], {"a": 4, "b": 0})
    assert domains.divergence(nothing)[0, 1].isnan().all()
    chart = divergence_chart(nothing)
    assert chart is not None and "a and b n/a" in chart.alt


def test_divergence_equals_a_plain_sum(profile: Profile) -> None:
    counts = profile.tensors["counts"][:, 1].double()
    p, q = (row / row.sum() for row in counts)
    total = 0.0
    for a, b in zip(p.tolist(), q.tolist(), strict=True):
        middle = (a + b) / 2
        total += sum(x / 2 * math.log2(x / middle) for x in (a, b) if x)
    assert float(domains.divergence(profile)[0, 1, 1]) == pytest.approx(total)


def test_specialists_do_not_depend_on_how_long_a_domain_is(profile: Profile) -> None:
    """Expert 0 works for a at 9 times b's rate; expert 1 for b; expert 2 equally; expert 3 hardly at all."""
    short = with_counts(profile, [[90, 10, 50, 0, 0, 0, 0, 0], [10, 60, 50, 0, 0, 0, 0, 0]], {"a": 100, "b": 100})
    long = with_counts(profile, [[90, 10, 50, 0, 0, 0, 0, 0], [100, 600, 500, 1, 0, 0, 0, 0]], {"a": 100, "b": 1000})
    for made in (short, long):
        found = domains.specialists(made)
        assert [(s.expert, s.domain) for s in found] == [(0, "a")] * 3 + [(1, "b")] * 3
        assert found[0].share == pytest.approx(0.9) and found[0].rates == pytest.approx({"a": 0.9, "b": 0.1})
        assert [s.layer for s in found[:3]] == list(LAYERS)
    assert domains.specialists(with_counts(profile, [[1] * 8], {"a": 4})) == []


def test_serving_counts_what_the_held_experts_serve(profile: Profile) -> None:
    held, matrix = domains.serving(profile, 0.25)
    counts = profile.tensors["counts"].flatten(1)
    assert held == len(LAYERS) * NUM_EXPERTS // 4 and matrix.shape == (3, 2)
    for row in range(2):
        hot = sorted(range(counts.shape[1]), key=lambda n, row=row: -int(counts[row, n]))[:held]
        for column in range(2):
            served = sum(int(counts[column, n]) for n in hot) / int(counts[column].sum())
            if row == column or len(set(counts[row].tolist())) == counts.shape[1]:
                assert float(matrix[row, column]) == pytest.approx(served)
    assert (matrix.diagonal() >= matrix[:2].amax(0) - 1e-12).all()
    assert torch.allclose(domains.serving(profile, 1.0)[1], torch.ones(3, 2).double())


def test_single_domain_has_nothing_to_compare(tmp_path: Path) -> None:
    assert divergence_chart(save_recorded(tmp_path / "one", {"a": [20, 30]})) is None
