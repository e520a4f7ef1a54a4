"""Settings of eviction and window from recorded routing, written as a deployment profile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml

from moespeq_cli.profile.replay import Recording
from runtime.artifacts.folder import write_guard
from runtime.artifacts.manifest import by_rename
from runtime.artifacts.profile import Profile
from runtime.errors import ArtifactError, InputError
from runtime.memory.clairvoyant import Replay, belady, replay
from runtime.memory.eviction import EvictionPolicy, make_policy
from runtime.memory.location import ExpertKey
from runtime.memory.sizes import parse_size

STEP = 0.25  # of the grid of weights, which sum to 1
DEFAULT = (0.6, 0.3, 0.1)
WINDOWS = (1, 2, 4, 8, 16, 24, 32)
CLOSE = 1.01  # a shorter window is taken where it reads at most so many times the best one's bytes
Weights = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was replayed and what it read, in bytes (or records of one byte where no pack gave sizes).

    Attributes:
        tokens: replayed ones.
        num_slots, num_experts: of the cache, and of the model.
        requests: experts asked for.
        reads: by policy, records read: lru, lfu, priority (the best point), lookahead (the best window), and
            clairvoyant, Belady's bound.
        grid: bytes read by (alpha, beta, gamma).
        windows: bytes read by window in tokens.
        weights, window: the chosen ones.
        eviction: the better of the two kinds.
        foresight: `draft` or `target`, whose routing the window showed.
        sized: whether a pack's record sizes were used.
    """

    tokens: int
    num_slots: int
    num_experts: int
    requests: int
    reads: dict[str, int]
    grid: dict[Weights, int]
    windows: dict[int, int]
    weights: Weights
    window: int
    eviction: str
    foresight: str
    sized: bool
    cache: str = field(default="25%")


def grid() -> list[Weights]:
    """The default weights and every point of the grid."""
    parts = round(1 / STEP)
    points = [
        (a * STEP, b * STEP, (parts - a - b) * STEP)
        for a, b in itertools.product(range(parts + 1), repeat=2)
        if a + b <= parts
    ]
    return [DEFAULT, *points]


def tune(
    profile: Profile,
    cache: str,
    sizes: Mapping[ExpertKey, int] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Tuning:
    """Replay the second half of the recorded sequences; heat comes from the first half, which it has not seen.

    Args:
        profile: with recorded routing.
        cache: size of the expert cache, such as 25% or 12GB.
        sizes: bytes of each expert's record in a pack; without it all are equal, and `cache` is a share.
        advance: called after each replay.

    Raises:
        ArtifactError: the profile has no recorded routing to split.
        InputError: the cache is no size, or holds no expert.
    """
    heat, recording = split(profile)
    num_slots = _slots(cache, recording.num_experts, sizes)
    trace = recording.trace
    size = (lambda key: 1) if sizes is None else sizes.__getitem__

    def run(policy: EvictionPolicy) -> Replay:
        done = replay(trace, num_slots, policy, record_bytes=size)
        advance()
        return done

    by_weights: dict[Weights, Replay] = {}
    outcomes: dict[tuple[object, ...], Replay] = {}
    for point in grid():
        key = _order(point, len({size(key) for key in heat}) == 1)
        if key not in outcomes:
            outcomes[key] = run(make_policy("priority", heat=heat, alpha=point[0], beta=point[1], gamma=point[2]))
        else:
            advance()
        by_weights[point] = outcomes[key]
    by_window: dict[int, Replay] = {}
    for window in WINDOWS:
        by_window[window] = recording.lookahead(num_slots, window, {key: size(key) for key in heat})
        advance()
    weights = min(by_weights, key=lambda point: by_weights[point].read_bytes)  # the default among equals
    least = min(done.read_bytes for done in by_window.values())
    window = min(w for w, done in by_window.items() if done.read_bytes <= CLOSE * least)
    better = by_window[window].read_bytes <= by_weights[weights].read_bytes
    lru, lfu = run(make_policy("lru")), run(make_policy("lfu"))
    return Tuning(
        tokens=recording.tokens,
        num_slots=num_slots,
        num_experts=recording.num_experts,
        requests=lru.requests,
        reads={
            "lru": lru.misses,
            "lfu": lfu.misses,
            "priority": by_weights[weights].misses,
            "lookahead": by_window[window].misses,
            "clairvoyant": belady(trace, num_slots),
        },
        grid={point: done.read_bytes for point, done in by_weights.items()},
        windows={w: done.read_bytes for w, done in by_window.items()},
        weights=weights,
        window=window,
        eviction="lookahead" if better else "priority",
        foresight="target" if recording.foreseen is None else "draft",
        sized=sizes is not None,
        cache=cache,
    )


def num_replays() -> int:
    """How often `tune` calls `advance`."""
    return len(grid()) + len(WINDOWS) + 2


def split(profile: Profile) -> tuple[dict[ExpertKey, float], Recording]:
    """Heat of every expert from the first half of the recorded sequences, and the second half to replay."""
    manifest = profile.manifest
    sequences = list(profile.traces())
    half = len(sequences) // 2
    if not half:
        raise ArtifactError(
            expected=f"recorded routing of two sequences or more in {profile.folder}",
            found=str(len(sequences)),
            mend="make the profile again with `moespeq profile --force`, more --samples or --trace-tokens",
        )
    chosen = torch.cat([sequence.target for sequence in sequences[:half]]).long()
    heat = {
        (layer, expert): float(share)
        for row, layer in enumerate(manifest.moe_layers)
        for expert, share in enumerate(chosen[:, row].flatten().bincount(minlength=manifest.num_experts) / len(chosen))
    }
    return heat, Recording.of(profile, sequences[half:])


def _order(point: Weights, equal_sizes: bool) -> tuple[object, ...]:
    """Points with equal outcomes have equal keys: records of one size and one time only leave heat to sort by."""
    return (point[0] > 0,) if equal_sizes else point


def _slots(cache: str, num_experts: int, sizes: Mapping[ExpertKey, int] | None) -> int:
    largest = max(sizes.values()) if sizes is not None else 1
    if sizes is None and not cache.strip().endswith("%"):
        raise InputError(
            expected="--tune-cache as a share, such as 25%, where no pack tells the size of an expert",
            found=cache,
            mend="pass a share, or --pack with a pack of this model",
        )
    slots = parse_size(cache, num_experts * largest) // largest
    if slots < 1:
        raise InputError(
            expected="--tune-cache of at least one expert", found=cache, mend=f"pass {100 / num_experts:.1f}% or more"
        )
    return min(slots, num_experts)


def lines(found: Tuning) -> list[str]:
    """The result for a person, also the comment of the file."""
    shares = {name: found.reads[name] / found.requests for name in found.reads}
    rows = [f"{name:<12} reads {100 * share:5.1f} % of {found.requests} requests" for name, share in shares.items()]
    unit = "bytes" if found.sized else "records"
    least, best = min(found.grid.values()), min(found.windows.values())
    weights = ", ".join(
        f"{'/'.join(f'{w:g}' for w in point)}: {size / least:.3f}" for point, size in found.grid.items()
    )
    windows = ", ".join(f"{w}: {size / best:.3f}" for w, size in found.windows.items())
    return [
        f"{found.tokens} recorded tokens, a cache of {found.num_slots} of {found.num_experts} experts ({found.cache}),"
        " empty at first:",
        *("  " + row for row in rows),
        f"{unit} that priority reads by alpha/beta/gamma, relative to the best: {weights}",
        f"{unit} that lookahead reads by window in tokens of the {found.foresight}'s routing, relative to the best: "
        f"{windows}",
    ]


def write_yaml(found: Tuning, path: Path, source: str) -> None:
    """The settings as a deployment profile for `moespeq run --config`, by rename.

    Args:
        found: the result.
        path: the file.
        source: what was replayed, for the comment.

    Raises:
        StorageError: it cannot be written.
    """
    body = {
        "eviction": found.eviction,
        "alpha": found.weights[0],
        "beta": found.weights[1],
        "gamma": found.weights[2],
        "prefetch_window": found.window,
        "expert_cache_size": found.cache,
    }
    notes = [f"Found by moespeq profile --tune on {source}.", *lines(found)]
    text = "".join(f"# {note}\n" for note in notes) + yaml.safe_dump(body, sort_keys=False)
    with write_guard("the deployment profile", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with by_rename(path) as part:
            part.write_text(text, encoding="utf-8")
