"""Both acceptance rules give the target's distribution; a seed gives one text (H15)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.artifacts.pack import Pack
from runtime.decode.sampling import RULES, Chooser, Proposal, SamplingSettings
from runtime.errors import InputError
from tests.decode.conftest import PackOf
from tests.decode.packs import assert_same, decode, prompt_of

DRAWS = 10_000
TARGET = torch.tensor([0.5, 0.3, 0.2]).log()
DRAFT = torch.tensor([0.2, 0.3, 0.5]).log()
WARM = SamplingSettings(temperature=1.0)


def draw(sampling: SamplingSettings, target: Tensor, draft: Tensor, count: int = DRAWS) -> tuple[Tensor, float]:
    """Shares of the tokens that come out, and of the proposals that were accepted."""
    chooser, counts, accepted = Chooser(sampling), torch.zeros(len(target)), 0
    for position in range(count):
        proposal = chooser.draft(draft, position)
        token = chooser.target(target, position, proposal)
        counts[token] += 1
        accepted += token == proposal.token
    return counts / count, accepted / count


def variation(shares: Tensor, wanted: Sequence[float]) -> float:
    return float((shares - torch.tensor(wanted)).abs().sum() / 2)


# By hand: temperature 0.5 squares the odds, of which top-k 2 leaves 25 : 9; top-p 0.7 needs the two likeliest.
HAND = [
    (SamplingSettings(temperature=1.0), [0.5, 0.3, 0.2]),
    (SamplingSettings(temperature=0.5, sample_top_k=2, seed=1), [25 / 34, 9 / 34, 0.0]),
    (SamplingSettings(temperature=1.0, top_p=0.7, seed=2), [0.625, 0.375, 0.0]),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("sampling", "wanted"), HAND, ids=["plain", "temperature and top-k", "top-p"])
def test_tokens_have_the_targets_distribution(rule: str, sampling: SamplingSettings, wanted: list[float]) -> None:
    shares, _ = draw(dataclasses.replace(sampling, rule=rule), TARGET, DRAFT)
    assert variation(shares, wanted) < 0.02


def test_acceptance_of_both_rules_is_the_one_that_theory_gives() -> None:
    """Rejection: 1 minus the distance, 0.7. Coupled: the sum over tokens i of 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    p, q = TARGET.exp().tolist(), DRAFT.exp().tolist()
    coupled = sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(3)) for i in range(3))
    assert coupled == pytest.approx(0.6308, abs=1e-4)
    _, shared = draw(dataclasses.replace(WARM, rule="coupled"), TARGET, DRAFT, 10_000)
    _, rejected = draw(dataclasses.replace(WARM, rule="rejection"), TARGET, DRAFT, 10_000)
    assert shared == pytest.approx(coupled, abs=0.02)
    assert rejected == pytest.approx(0.7, abs=0.02)


@pytest.mark.parametrize("rule", RULES)
def test_equal_logits_are_always_accepted_and_disjoint_ones_never(rule: str) -> None:
    sampling = dataclasses.replace(WARM, rule=rule)
    shares, accepted = draw(sampling, TARGET, TARGET, 2000)
    assert accepted == 1.0
    left, right = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.0, 0.0, 1.0]).log()
    shares, accepted = draw(sampling, left, right, 2000)
    assert accepted == 0.0 and shares[2] == 0 and variation(shares, [0.5, 0.5, 0]) < 0.05


@pytest.mark.parametrize("rule", RULES)
def test_seeds_are_independent_draws_too(rule: str) -> None:
    """One position, many seeds: nobody who runs a prompt again and again sees a bias."""
    counts = torch.zeros(3)
    for seed in range(4000):
        chooser = Chooser(dataclasses.replace(WARM, rule=rule, seed=seed))
        counts[chooser.target(TARGET, 17, chooser.draft(DRAFT, 17))] += 1
    assert variation(counts / 4000, [0.5, 0.3, 0.2]) < 0.03


def test_neighbouring_positions_do_not_influence_each_other() -> None:
    chooser = Chooser(WARM)
    tokens = [chooser.target(TARGET, position, None) for position in range(8000)]
    pairs = torch.zeros(3, 3)
    for first, second in itertools.pairwise(tokens):
        pairs[first, second] += 1
    independent = TARGET.exp()[:, None] * TARGET.exp()[None]
    assert float((pairs / pairs.sum() - independent).abs().sum() / 2) < 0.03


@given(
    logits=st.lists(st.integers(-1280, 1280).map(lambda n: n / 64), min_size=1, max_size=12),  # apart in float64 too
    temperature=st.floats(0.05, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 14),
)
@settings(max_examples=100, deadline=None)
def test_distribution_keeps_the_likeliest_and_sums_to_one(
    logits: list[float], temperature: float, top_p: float, top_k: int
) -> None:
    chooser = Chooser(SamplingSettings(temperature, top_p, top_k))
    scores = torch.tensor(logits)
    probs = chooser.distribution(scores)
    assert probs.sum().item() == pytest.approx(1) and (probs >= 0).all()
    kept = probs > 0
    assert kept[scores.argmax()]
    if top_k and len(set(logits)) == len(logits):
        assert int(kept.sum()) <= top_k
    whole = (scores.double() / temperature).softmax(-1)
    if top_k == 0:
        # Without the least likely of the kept tokens, the threshold is not reached.
        assert whole[kept].sum() - whole[kept].min() < top_p + 1e-12
        assert whole[kept].sum() >= min(top_p, 1) - 1e-9
    assert not kept.any() or not (~kept).any() or scores[kept].min() >= scores[~kept].max()


def test_tokens_outside_top_k_and_top_p_never_come_out() -> None:
    scores = torch.linspace(0, 1, 50)
    for rule in RULES:
        chooser = Chooser(SamplingSettings(temperature=2.0, top_p=0.9, sample_top_k=5, rule=rule))
        for position in range(500):
            assert chooser.target(scores, position, chooser.draft(-scores, position)) >= 45


def test_temperature_zero_is_greedy_whatever_else_is_set() -> None:
    for rule in RULES:
        chooser = Chooser(SamplingSettings(0.0, top_p=0.3, sample_top_k=2, seed=7, rule=rule))
        for position in range(20):
            assert chooser.draft(DRAFT, position) == Proposal(2)
            assert chooser.target(TARGET, position, Proposal(2)) == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"sample_top_k": -1},
        {"seed": -1},
        {"seed": 2**63},
        {"rule": "best"},
    ],
)
def test_impossible_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InputError):
        SamplingSettings(**bad)  # type: ignore[arg-type]


SAMPLED = SamplingSettings(temperature=0.8, top_p=0.95, sample_top_k=40, seed=5)


@pytest.fixture(scope="module")
def pack(pack_of: PackOf) -> Pack:
    return pack_of("qwen2_moe", torch.float32)


def test_coupled_text_of_a_seed_is_the_same_with_any_window(pack: Pack) -> None:
    alone = decode(pack, prompt_of(8), 24, sampling=SAMPLED, speculate=False)
    for window, verify in ((1, 0), (4, 4), (16, 8)):
        run = decode(
            pack, prompt_of(8), 24, sampling=SAMPLED, prefetch_window=window, verify_window=verify, governor="fixed"
        )
        assert_same(run, alone)
        assert 0 < run.report["acceptance"] < 1
    other = decode(pack, prompt_of(8), 24, sampling=dataclasses.replace(SAMPLED, seed=6), speculate=False)
    assert other.tokens != alone.tokens
    greedy = decode(pack, prompt_of(8), 24, speculate=False)
    assert greedy.tokens != alone.tokens


def test_rejection_text_of_a_seed_is_the_same_each_time(pack: Pack) -> None:
    sampling = dataclasses.replace(SAMPLED, rule="rejection")
    runs = [decode(pack, prompt_of(8), 24, sampling=sampling, prefetch_window=6, verify_window=4) for _ in range(2)]
    assert runs[0].tokens == runs[1].tokens
    assert 0 < runs[0].report["acceptance"] < 1


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_tiny_temperature_is_greedy(rule: str) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -5.0])
    chooser = Chooser(SamplingSettings(temperature=1e-308, rule=rule))
    assert [chooser.target(logits, position, None) for position in range(5)] == [1] * 5


def test_all_bits_of_a_seed_count() -> None:
    logits = torch.zeros(1000)
    texts = [
        [Chooser(SamplingSettings(1.0, seed=seed)).target(logits, position, None) for position in range(8)]
        for seed in (5, 5 + 2**32, 5 + 2**62)
    ]
    assert texts[0] != texts[1] != texts[2] != texts[0]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 4.0])
def test_top_p_of_a_large_vocabulary_keeps_what_a_full_sort_keeps(top_p: float, spread: float) -> None:
    """Both ways: the likely tokens suffice, and they do not."""
    logits = spread * torch.randn(5000, generator=torch.Generator().manual_seed(2))
    kept = Chooser(SamplingSettings(1.0, top_p)).distribution(logits) > 0
    probs, order = logits.double().softmax(0).sort(descending=True)
    expected = order[probs.cumsum(0) - probs < top_p]
    assert set(kept.nonzero()[:, 0].tolist()) == set(expected.tolist())
