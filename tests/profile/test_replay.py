"""Caches on recorded routing, and the settings that are found by them."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from moespeq_cli.profile import replay, tune
from moespeq_cli.profile.replay import Recording, cache_curve
from runtime.artifacts.profile import ROUTING, Profile
from runtime.config import load_profile, make_settings
from runtime.errors import ArtifactError, InputError
from runtime.memory.clairvoyant import replay as replayed
from runtime.memory.eviction import make_policy
from tests.profile.recorded import LAYERS, NUM_EXPERTS, TOP_K, save_recorded
from tests.profile.test_command import app

LENGTHS = {"code": [60, 40, 30, 50], "prose": [50, 70, 20, 40]}
ALL = len(LAYERS) * NUM_EXPERTS


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return save_recorded(tmp_path_factory.mktemp("recorded") / "profile", LENGTHS, draft_noise=0.1)


def test_curve_rises_with_size_and_stays_below_belady(profile: Profile) -> None:
    curve = cache_curve(profile)
    assert curve is not None and curve.foresight == "draft" and curve.slots[-1] == ALL
    assert curve.tokens == sum(map(sum, LENGTHS.values()))
    for name, values in curve.hits.items():
        assert len(values) == len(curve.slots), name
        assert all(0 <= value <= best + 1e-12 for value, best in zip(values, curve.hits["belady"], strict=True)), name
    belady = curve.hits["belady"]
    assert all(low <= high for low, high in itertools.pairwise(belady))
    requests = curve.tokens * len(LAYERS) * TOP_K
    different = int((profile.tensors["counts"].sum(0) > 0).sum())
    assert all(values[-1] == pytest.approx(1 - different / requests) for values in curve.hits.values())
    assert sum(curve.hits["lookahead"]) > sum(curve.hits["lru"])


def test_a_right_draft_foresees_as_the_target_would(tmp_path: Path) -> None:
    right = cache_curve(save_recorded(tmp_path / "right", LENGTHS, draft_noise=0.0))
    none = cache_curve(save_recorded(tmp_path / "none", LENGTHS))
    wrong = cache_curve(save_recorded(tmp_path / "wrong", LENGTHS, draft_noise=1.0))
    assert right is not None and none is not None and wrong is not None
    assert right.hits == none.hits and none.foresight == "target"
    assert sum(wrong.hits["lookahead"]) < sum(right.hits["lookahead"])


def test_pieces_of_all_sequences_come_in_turn(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "PIECE_TOKENS", 7)
    monkeypatch.setattr(replay, "MAX_DEMANDS", 40 * len(LAYERS))
    sequences = list(profile.traces())
    recording = Recording.of(profile, sequences)
    assert recording.tokens == 40 and recording.foreseen is not None and len(recording.foreseen) == len(recording.trace)
    for place in range(5):
        row = [expert for demand in recording.trace[place * 7 * len(LAYERS) :][: len(LAYERS)] for _, expert in demand]
        assert row == sequences[place].target[0].flatten().tolist()
    assert [key[0] for demand in recording.trace[: len(LAYERS)] for key in demand] == [1, 1, 2, 2, 4, 4]


def test_without_recorded_routing_there_is_no_curve_and_nothing_to_tune(tmp_path: Path) -> None:
    empty = save_recorded(tmp_path / "empty", {"a": []})
    assert cache_curve(empty) is None
    with pytest.raises(ArtifactError, match="two sequences"):
        tune.tune(empty, "25%")


def test_heat_and_replay_share_no_token(profile: Profile) -> None:
    heat, recording = tune.split(profile)
    sequences = list(profile.traces())
    first = sum(len(sequence.target) for sequence in sequences[:4])
    assert recording.tokens == sum(len(sequence.target) for sequence in sequences[4:])
    assert len(heat) == ALL and sum(heat.values()) == pytest.approx(len(LAYERS) * TOP_K)
    used = sum((sequence.target[:, 1] == 5).any(1).sum().item() for sequence in sequences[:4])
    assert heat[LAYERS[1], 5] == pytest.approx(used / first)


def test_every_point_has_the_reads_of_its_own_replay(profile: Profile) -> None:
    """The points that are not replayed because they sort alike are replayed here."""
    heat, recording = tune.split(profile)
    for sizes in (None, {key: 4096 * (1 + key[1] % 3) for key in heat}):
        found = tune.tune(profile, "25%", sizes)
        assert found.num_slots == ALL // 4 and len(found.grid) == 16
        assert all(sum(point) == pytest.approx(1) for point in found.grid)
        for (alpha, beta, gamma), size in found.grid.items():
            policy = make_policy("priority", heat=heat, alpha=alpha, beta=beta, gamma=gamma)
            one = replayed(recording.trace, 6, policy, record_bytes=(sizes or dict.fromkeys(heat, 1)).__getitem__)
            assert one.read_bytes == size, (alpha, beta, gamma)
        assert found.grid[found.weights] == min(found.grid.values())
        assert found.windows[found.window] <= tune.CLOSE * min(found.windows.values())
        assert all(found.reads["clairvoyant"] <= reads for reads in found.reads.values())


def test_the_file_is_a_deployment_profile(profile: Profile, tmp_path: Path) -> None:
    place, calls = tmp_path / "new" / "tuned.yaml", []
    found = tune.tune(profile, "30%", advance=lambda: calls.append(1))
    assert len(calls) == tune.num_replays()
    tune.write_yaml(found, place, "a test")
    settings = make_settings(str(place), {})
    assert (settings.eviction, settings.prefetch_window) == (found.eviction, found.window)
    assert (settings.alpha, settings.beta, settings.gamma) == found.weights
    assert settings.expert_cache_size == "30%" and load_profile(str(place)) == yaml.safe_load(place.read_text())
    comment = place.read_text()
    assert "a test" in comment and "clairvoyant" in comment and not list(place.parent.glob("*.part"))


def test_command_writes_it_and_keeps_what_is_there(profile: Profile, tmp_path: Path) -> None:
    base = ["--tune", "--out", str(profile.folder), "--artifacts", str(tmp_path)]
    before = {path.name: path.read_bytes() for path in profile.folder.iterdir()}
    done = CliRunner().invoke(app, [*base, "--json"])
    body = json.loads(done.stdout)
    assert body["path"] == str(tmp_path / "tuned.yaml") and len(body["grid"]) == 16 and "clairvoyant" in done.stderr
    again = CliRunner().invoke(app, base)
    assert isinstance(again.exception, InputError) and "--force" in again.exception.mend
    forced = CliRunner().invoke(app, [*base, "--force", "--tune-cache", "50%"])
    assert forced.exit_code == 0 and forced.stdout == f"{tmp_path / 'tuned.yaml'}\n"
    assert make_settings(str(tmp_path / "tuned.yaml"), {}).expert_cache_size == "50%"
    for cache, words in (("12MB", "no pack"), ("1%", "one expert"), ("much", "size")):
        refused = CliRunner().invoke(app, [*base, "--force", "--tune-cache", cache])
        assert isinstance(refused.exception, InputError) and words in str(refused.exception), cache
    missing = CliRunner().invoke(app, ["--tune", "--artifacts", str(tmp_path / "none")])
    assert isinstance(missing.exception, ArtifactError)
    assert {path.name: path.read_bytes() for path in profile.folder.iterdir()} == before
    damaged = Path(shutil.copytree(profile.folder, tmp_path / "damaged"))
    body = bytearray((damaged / ROUTING).read_bytes())
    body[-1] ^= 1
    (damaged / ROUTING).write_bytes(body)
    refused = CliRunner().invoke(app, ["--tune", "--out", str(damaged), "--artifacts", str(tmp_path / "none")])
    assert isinstance(refused.exception, ArtifactError) and "sha256" in str(refused.exception)
