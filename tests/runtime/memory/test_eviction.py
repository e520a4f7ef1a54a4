from __future__ import annotations

import pytest

from runtime.errors import InputError
from runtime.memory.eviction import POLICIES, make_policy

A, B, C = (0, 0), (0, 1), (0, 2)


def test_lru_evicts_the_first_candidate() -> None:
    assert make_policy("lru").victim([B, A, C], {B: 0}) == B


def test_lfu_evicts_the_rarest_and_of_equals_the_least_recent() -> None:
    policy = make_policy("lfu")
    for key in (A, A, B, C):
        policy.used(key)
    assert policy.victim([A, C, B], {}) == C
    assert policy.victim([A, (5, 5), B], {}) == (5, 5)


def test_lookahead_evicts_what_the_window_does_not_need_least_recent_first() -> None:
    assert make_policy("lookahead").victim([A, B, C], {A: 99}) == B


def test_lookahead_evicts_the_furthest_next_use() -> None:
    assert make_policy("lookahead").victim([A, B, C], {A: 3, B: 7, C: 5}) == B


def test_priority_weighs_heat_size_and_time() -> None:
    cold = make_policy("priority", heat={A: 10, B: 1, C: 5})
    assert cold.victim([A, B, C], {}) == B
    sized = make_policy("priority", heat={A: 5, B: 5, C: 5})
    for key, num_bytes in ((A, 100), (B, 50), (C, 100)):
        sized.loaded(key, num_bytes, 1.0)
    assert sized.victim([A, B, C], {}) == B
    timed = make_policy("priority", heat={A: 5, B: 5, C: 5})
    for key, seconds in ((A, 2.0), (B, 2.0), (C, 0.5)):
        timed.loaded(key, 100, seconds)
    assert timed.victim([A, B, C], {}) == C
    heavy = make_policy("priority", heat={A: 10, B: 1}, alpha=0.0, beta=1.0, gamma=0.0)
    heavy.loaded(A, 10, 1.0)
    heavy.loaded(B, 20, 1.0)
    assert heavy.victim([A, B], {}) == A


def test_priority_counts_uses_without_a_profile() -> None:
    policy = make_policy("priority")
    assert policy.victim([B, A], {}) == B
    for key in (A, B, B):
        policy.used(key)
    assert policy.victim([B, A], {}) == A


@pytest.mark.parametrize("name", POLICIES)
def test_no_candidate_no_victim(name: str) -> None:
    policy = make_policy(name)
    assert policy.name == name
    assert policy.victim([], {A: 1}) is None


def test_unknown_policy_is_refused_with_the_names() -> None:
    with pytest.raises(InputError, match=r"lookahead.*'fifo'"):
        make_policy("fifo")
