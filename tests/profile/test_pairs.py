"""Pairs against chance: 1 where nothing but use decides, whatever the uses are; and the strongest pair is found."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moespeq_cli.profile.charts_sensitivity import coactivation_charts
from moespeq_cli.profile.pairs import by_chance, lifts, strongest
from runtime.artifacts.profile import Profile
from tests.profile.recorded import LAYERS, NUM_EXPERTS, save_recorded


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return save_recorded(tmp_path_factory.mktemp("pairs") / "profile", {"code": [90, 40], "prose": [300]})


def of_sets(recorded: Profile, sets: list[tuple[int, ...]]) -> Profile:
    """A profile of tokens that chose these experts, the same in every layer."""
    chosen = torch.zeros(len(sets), NUM_EXPERTS, dtype=torch.int64)
    for row, experts in enumerate(sets):
        chosen[row, list(experts)] = 1
    manifest = replace(recorded.manifest, top_k=len(sets[0]), domains={"a": len(sets)}, sequences={"a": 1})
    tensors = {**recorded.tensors, "coactivation": (chosen.T @ chosen)[None].repeat(len(LAYERS), 1, 1)}
    return Profile(recorded.folder, manifest, tensors)


def off_diagonal(matrix: Tensor) -> Tensor:
    return matrix[~torch.eye(len(matrix), dtype=torch.bool)]


@pytest.mark.parametrize("top_k", [2, 3, 4, 7, 8])
def test_every_set_of_experts_once_is_what_chance_gives(recorded: Profile, top_k: int) -> None:
    made = of_sets(recorded, list(itertools.combinations(range(NUM_EXPERTS), top_k)))
    found = lifts(made, 0)
    assert found.diagonal().isnan().all()
    torch.testing.assert_close(off_diagonal(found), torch.ones(NUM_EXPERTS * (NUM_EXPERTS - 1)).double())


@pytest.mark.parametrize("top_k", [2, 3, 5])
def test_an_expert_of_every_token_meets_nobody_more_than_chance(recorded: Profile, top_k: int) -> None:
    sets = [(0, *rest) for rest in itertools.combinations(range(1, NUM_EXPERTS), top_k - 1)]
    found = lifts(of_sets(recorded, sets), 1)
    torch.testing.assert_close(found[0, 1:], torch.ones(NUM_EXPERTS - 1).double(), atol=2e-2, rtol=0)
    if top_k > 2:  # with two a token, the others never meet one another
        torch.testing.assert_close(off_diagonal(found[1:, 1:]), torch.ones(42).double(), atol=2e-2, rtol=0)


def test_chance_has_each_experts_meetings_and_is_a_product() -> None:
    uses = torch.tensor([400, 3, 120, 77, 0, 250, 31, 319])  # 1200 = 400 tokens x 3, one expert in all, one in none
    chance = by_chance(uses, 3)
    torch.testing.assert_close(chance.sum(1), 2.0 * uses.double(), atol=0.1, rtol=1e-3)
    assert torch.equal(chance, chance.T) and not chance.diagonal().any() and not chance[4].any()
    used = [0, 1, 2, 3, 5, 6, 7]
    for a, b, c, d in itertools.permutations(used, 4):
        torch.testing.assert_close(chance[a, b] * chance[c, d], chance[a, d] * chance[c, b])


def test_top_1_has_no_pairs(recorded: Profile) -> None:
    made = of_sets(recorded, [(n % 5,) for n in range(100)])
    assert lifts(made, 0).isnan().all() and strongest(made, 0) is None
    assert "Strongest pair: none." in coactivation_charts(made)[0].alt


def test_the_strongest_pair_is_named_and_a_rare_one_is_not(recorded: Profile) -> None:
    even = list(itertools.combinations(range(NUM_EXPERTS - 1), 2)) * 40
    made = of_sets(recorded, even + [(2, 5)] * 100 + [(6, 7)] * 4)
    pair = strongest(made, 2)
    assert pair is not None and (pair.layer, pair.first, pair.second) == (LAYERS[2], 2, 5)
    assert pair.share == pytest.approx(140 / 944) and 1.5 < pair.lift < 3
    assert float(lifts(made, 2)[6, 7]) > pair.lift  # it meets more often than chance too, on 0.4 % of the tokens
    chart = coactivation_charts(made)[2]
    assert chart.layer == LAYERS[2] and chart.lift[3][3] is None
    assert f"Strongest pair: 2 and 5, {pair.lift:.2f} times chance, on 14.8 %" in chart.alt
