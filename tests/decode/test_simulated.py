"""The simulation of decoding keeps to what it simulates, and leaves nothing behind."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

import runtime.decode.loop
import runtime.memory.cache
import runtime.memory.transfer
from runtime.decode.governor import Fixed, Measured, Situation, make_governor
from runtime.memory.window import Window
from tests.decode.simulated.__main__ import main
from tests.decode.simulated.clock import Clock, in_virtual_time
from tests.decode.simulated.constants import H200, QWEN1_5_MOE, SLOW_HOST, Model
from tests.decode.simulated.device import Gpu
from tests.decode.simulated.world import Figures, Run, World, decode, simulate

MODEL = Model(6, 16, 2, 96 * 17_000_000, 0, 9_400_000, 0)
ALL = MODEL.layers * MODEL.experts
COSTS = replace(H200, step_s=H200.step_s / 4)  # with a quarter of the layers
RUN = Run(MODEL, ALL // 2, MODEL.record_bytes, tokens=32, prompt=8, costs=COSTS)
WAYS = (("fixed", 0), ("fixed", 3), ("fixed", 7), ("threshold", 7), ("roofline", 7))


def world_after(run: Run, way: tuple[str, int] = ("roofline", 7), seed: int = 0) -> World:
    """A world after a text, with no copy under way."""
    world = World(run, run.routing(seed))
    decode(world, run, make_governor(*way))
    with in_virtual_time(world.clock, lambda: None):
        world.cache.rest()
    return world


def figures_of(run: Run, way: tuple[str, int] = ("roofline", 7), seed: int = 0) -> Figures:
    return simulate(run, make_governor(*way), run.routing(seed))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slots", [RUN.fewest_slots, ALL // 2, ALL])
def test_text_is_the_targets_whatever_the_governor(way: tuple[str, int], slots: int) -> None:
    run = replace(RUN, slots=slots, likeness=replace(RUN.likeness, right=0.8))
    assert decode(World(run, run.routing(1)), run, make_governor(*way)) == list(range(8, 40))


@pytest.mark.parametrize("way", WAYS)
def test_bytes_moved_are_the_caches_and_the_link_is_used_no_more_than_all_the_time(way: tuple[str, int]) -> None:
    world = world_after(RUN, way)
    stats = world.cache.stats
    assert world.link.num_bytes == stats.read_bytes == (stats.demand_reads + stats.prefetch_reads) * RUN.record_bytes
    assert 0 < world.link.busy_s <= stats.link_busy_s <= world.clock.now
    assert 0 < figures_of(RUN, way).link <= 1


@pytest.mark.parametrize("way", WAYS[1:])
def test_faster_link_is_never_slower_in_the_mean(way: tuple[str, int]) -> None:
    """With one row a pass it can be: a tail that nothing waits for is drafted step by step."""

    def ms(rate: float) -> float:
        run = replace(RUN, costs=replace(COSTS, link_bytes_per_s=rate))
        return mean(figures_of(run, way, seed).ms for seed in range(5))

    times = [ms(rate) for rate in (15e9, 30e9, 60e9, 120e9)]
    assert times == sorted(times, reverse=True)


def test_link_has_work_where_two_rows_fill_the_slots() -> None:
    """Raw records at 40 %: what may give way without another read is needed by the pass until it has used it."""
    run = Run(QWEN1_5_MOE, QWEN1_5_MOE.slots(0.4, "raw"), QWEN1_5_MOE.record("raw"), tokens=32)
    assert mean(figures_of(run, seed=seed).link for seed in range(3)) > 0.91  # 0.87 where it waits for that


def test_slower_host_is_slower() -> None:
    slow = replace(RUN, costs=replace(SLOW_HOST, step_s=COSTS.step_s))
    assert mean(figures_of(slow, seed=seed).ms - figures_of(RUN, seed=seed).ms for seed in range(4)) > 0


def test_rate_of_the_link_is_found_however_slow_the_host_is() -> None:
    """Not by the time that copies seem to take: they are seen late, and the link stands still meanwhile."""
    slow = replace(SLOW_HOST, step_s=COSTS.step_s, announce_s=3e-3, finish_s=2e-3)
    for rate in (20e9, 55e9):
        stats = world_after(replace(RUN, costs=replace(slow, link_bytes_per_s=rate))).cache.stats
        assert stats.bytes_per_s == pytest.approx(rate, rel=0.03)
        assert stats.read_bytes / stats.link_busy_s < 0.95 * rate


class Watched(Fixed):
    """Keeps what was measured."""

    measured = Measured()

    def choose(self, situation: Situation) -> int:
        self.measured = situation.measured
        return super().choose(situation)


def test_waiting_for_experts_is_no_cost_of_a_pass() -> None:
    """With a link a quarter as fast passes take far longer; what the rows of one cost is much the same."""

    def costs_and_waiting(rate: float) -> tuple[float, float]:
        run, governor = replace(RUN, costs=replace(COSTS, link_bytes_per_s=rate), tokens=64), Watched(3)
        wait_s = simulate(run, governor, run.routing(0)).wait_ms / 1e3 * run.tokens
        return governor.measured.pass_s(4), wait_s

    (fast_s, short_s), (slow_s, long_s) = costs_and_waiting(60e9), costs_and_waiting(15e9)
    assert long_s > 4 * short_s
    assert slow_s == pytest.approx(fast_s, rel=0.35)


class Varying(Watched):
    """Now more, now fewer."""

    def choose(self, situation: Situation) -> int:
        super().choose(situation)
        return min(next(self.numbers), situation.most)

    numbers = itertools.cycle((7, 1, 4))


def test_passes_of_more_rows_are_seen_to_cost_more() -> None:
    """They read more experts: of a layer's 60 a row needs 4, eight rows 20 to 24."""
    model = replace(MODEL, layers=12, experts=60, top_k=4)
    run = replace(RUN, model=model, slots=720, tokens=256, prompt=200)
    governor = Varying(7)
    simulate(run, governor, run.routing(0))
    more_s = governor.measured.pass_s(8) - governor.measured.pass_s(1)
    assert more_s == pytest.approx(model.layers * 18 * run.costs.expert_s, rel=0.3)


def test_with_slots_for_every_expert_each_is_read_once() -> None:
    world = world_after(replace(RUN, slots=ALL, tokens=64))
    assert world.link.num_bytes == world.cache.num_resident * RUN.record_bytes
    assert world.cache.stats.evictions == 0


def test_figures_are_the_seeds() -> None:
    first, again, other = (figures_of(RUN, seed=seed) for seed in (3, 3, 4))
    assert first == again != other


class Refusing(Fixed):
    """Fails at the third choice."""

    def __init__(self) -> None:
        super().__init__(3)
        self.left = 2

    def choose(self, situation: Situation) -> int:
        if not self.left:
            raise KeyError("enough")
        self.left -= 1
        return super().choose(situation)


def test_nothing_stays_patched() -> None:
    modules, plain = (runtime.decode.loop, runtime.memory.cache, runtime.memory.transfer), Window.announce
    clock = Clock()
    with in_virtual_time(clock, lambda: None):
        assert all(module.time is not time for module in modules)
        clock.spend(2.5)
        assert modules[0].time.perf_counter() == 2.5
        assert Window.announce is not plain
        assert not hasattr(modules[0].time, "sleep")
    figures_of(RUN)
    with pytest.raises(KeyError, match="enough"):
        simulate(RUN, Refusing(), RUN.routing(0))
    assert all(module.time is time for module in modules)
    assert Window.announce is plain


def test_pass_takes_its_layers_and_waits_at_a_gate_for_what_is_missing() -> None:
    clock = Clock()
    gpu = Gpu(clock, H200, layers=2)
    layer_s = H200.dense_s + H200.experts_s
    for key in ((0, 0), (0, 1), (1, 0)):
        gpu.put(key, 0)
    gpu.begin([[(0, 0), (0, 1)], [(1, 0), (1, 5)]])
    clock.until(1.0)
    gpu.catch_up()
    assert (gpu.has_told(1), gpu.over(), gpu.next_event) == (True, False, float("inf"))
    assert not gpu.withdraw((1, 0))  # its layer has chosen, and the host has not met it
    gpu.meet(1)
    gpu.put((1, 5), 0)
    assert gpu.next_event == pytest.approx(1.0 + H200.late_s + H200.expert_s)
    clock.until(2.0)
    gpu.catch_up()
    assert gpu.end == pytest.approx(1.0 + H200.late_s + H200.expert_s + H200.head_s)
    gpu.finish()
    assert gpu.withdraw((1, 0))
    gpu.put((1, 0), 0)
    gpu.begin([[(0, 0), (0, 1)], [(1, 0), (1, 5)]])
    clock.until(3.0)
    gpu.catch_up()
    assert gpu.end == pytest.approx(2.0 + 2 * layer_s + 4 * H200.expert_s + H200.head_s)
    assert gpu.queue_steps(2) == pytest.approx([3.0 + H200.step_s, 3.0 + 2 * H200.step_s])


def test_routing_is_as_alike_as_that_of_the_built_model() -> None:
    routing, positions, layers = Run(QWEN1_5_MOE, 0, 0).routing(0), range(1, 128), range(24)

    def shared(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> float:
        return len(set(one) & set(other)) / len(one)

    rows = [routing.by_target(position, position) for position in range(128)]
    assert all(len({expert for at, expert in rows[5] if at == layer}) == 4 for layer in layers)
    assert mean(shared(rows[i], rows[i - 1]) for i in positions) == pytest.approx(0.25, abs=0.02)
    assert mean(shared(rows[i], routing.by_draft(i, i)) for i in positions) == pytest.approx(0.95, abs=0.01)
    assert routing.by_target(-9, 9) == routing.by_draft(-9, 9) != rows[9]


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--memory", "75%", "--encoding", "residual", "--fixed", "1", "--texts", "2", "--tokens", "8"]
    main([*options, "--json", str(tmp_path / "simulated.json")])
    _, fixed, roofline = capsys.readouterr().out.splitlines()
    result = json.loads((tmp_path / "simulated.json").read_text(encoding="utf-8"))
    assert [row["way"] for row in result["rows"]] == ["fixed 1", "roofline"]
    for line, row in zip((fixed, roofline), result["rows"], strict=True):
        assert line.startswith("residual     75%  1257")
        assert f"{mean(text['ms'] for text in row['texts']):.2f} (" in line


def test_slots_are_those_of_the_benchmark() -> None:
    assert (QWEN1_5_MOE.slots(0.51, "residual"), QWEN1_5_MOE.slots(0.51, "raw")) == (644, 363)


@pytest.mark.parametrize(
    "options", [["--memory", "26%"], ["--encoding", "int8"], ["--governor", "best"], ["--texts", "0"]]
)
def test_what_cannot_be_simulated_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert "error: " in capsys.readouterr().err
    with pytest.raises(ValueError, match="a pass needs 16 slots, there are 15"):
        figures_of(replace(RUN, slots=15))
