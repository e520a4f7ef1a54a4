"""Passes that wait for experts on the device while the host goes on, with a thread in the GPU's place."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Request
from runtime.errors import ArtifactError
from runtime.gpu.board import SlotBoard
from runtime.gpu.engine import GpuEngine
from runtime.gpu.target import Way
from runtime.kernels.gate import FRESH
from runtime.kernels.rows import Routing
from runtime.kernels.rows_reference import TorchRows
from runtime.memory.cache import ExpertCache
from runtime.memory.stream import Hold
from tests.decode.conftest import PackOf
from tests.decode.packs import build, prompt_of
from tests.gpu.stand_in import HostGates, Processor, open_gpu

PLACES, EXPERTS, ROWS, TOP_K = 4, 8, 2, 2
REQUEST = Request(prompt_of(20), 14, frozenset(), SamplingSettings())


def make_board(fresh: bool = False) -> SlotBoard:
    return SlotBoard(Processor(), (0, 1, 3, 4), EXPERTS, ROWS, TOP_K, lambda key, slot: fresh)


def settings_of(pack: Pack, slots: int, **changes: Any) -> RunSettings:
    return RunSettings(expert_cache_size=str(slots * pack.target_slot_bytes), context=128, **changes)


def alone(pack: Pack) -> list[int]:
    with open_gpu(pack, RunSettings(expert_cache_size="100%", context=128, speculate=False)) as engine:
        return list(engine.generate(REQUEST))


def test_an_expert_goes_only_where_the_pass_cannot_have_looked() -> None:
    board = make_board()
    for place, layer_id in enumerate((0, 1, 3, 4)):
        board.put((layer_id, 5), 10 + place)
    assert board.withdraw((1, 5)) and int(board.seen[1, 5]) == -1  # no pass is under way
    board.put((1, 5), 11)
    board.begin()
    assert board.under_way and not board.has_told(0)
    board.told_seen[0] = torch.tensor([[5, 1], [5, 2]])
    assert board.has_told(0) and board.told(0) == [5, 1, 2]
    assert not board.withdraw((0, 5)) and int(board.seen[0, 5]) == 10  # it has told, and nobody has heard
    board.meet(0)
    assert board.withdraw((0, 5)) and board.withdraw((4, 5))  # of the cache's pins it knows nothing; not told
    board.told_seen[1] = 3
    assert not board.withdraw((1, 5))
    board.end()
    assert board.withdraw((1, 5)) and not board.under_way


def test_a_row_that_is_told_in_part_is_not_told() -> None:
    board = make_board()
    board.begin()
    board.told_seen[2] = torch.tensor([[-1, 1], [5, 2]])
    assert not board.has_told(2)
    board.told_seen[2, 0, 0] = 0
    assert board.has_told(2) and board.routing(2)[2] == [[0, 1], [5, 2]]


def test_what_is_not_admitted_says_so() -> None:
    board = make_board(fresh=True)
    board.put((3, 2), 7)
    assert int(board.seen[2, 2]) == 7 | FRESH
    assert HostGates() is not None and int(make_board().seen.max()) == -1


def test_no_slot_is_taken_from_a_pass_that_reads_it() -> None:
    """One thread plays passes, the other one evicts and overwrites whatever the board lets go."""
    board, gates = make_board(), HostGates()
    slots = [0] * (PLACES * EXPERTS)  # what lies in each
    where = {(layer_id, e): place * EXPERTS + e for place, layer_id in enumerate((0, 1, 3, 4)) for e in range(EXPERTS)}
    for key, slot in where.items():
        slots[slot] = hash(key)
        board.put(key, slot)
    here, late = torch.full((2, EXPERTS), -1, dtype=torch.int32)
    faults: list[Any] = []
    taken = 0

    def play(rounds: list[torch.Tensor]) -> None:
        for place, index in enumerate(rounds):
            gates.open(index, board.told_seen[place], board.seen[place], here)
            layer_id = (0, 1, 3, 4)[place]
            for _ in range(2):  # those that are there, then the others
                for expert in set(index.flatten().tolist()):
                    if here[expert] >= 0 and slots[int(here[expert])] != hash((layer_id, expert)):
                        faults.append((place, expert))
                time.sleep(0)
                gates.wait(index, board.seen[place], board.stop_seen, here, late, None)
                here.copy_(torch.where(late >= 0, late, here))

    chance = random.Random(3)
    for _ in range(60):
        rounds = [torch.randint(EXPERTS, (ROWS, TOP_K), dtype=torch.int32) for _ in range(PLACES)]
        board.begin()
        thread = threading.Thread(target=play, args=(rounds,))
        thread.start()
        pinned: set[Any] = set()
        gone: list[Any] = []
        for place, layer_id in enumerate((0, 1, 3, 4)):
            while not board.has_told(place):
                key = chance.choice(list(where))
                if key not in pinned and key not in gone and board.withdraw(key):
                    slots[where[key]] = 0
                    gone.append(key)
                    taken += 1
                time.sleep(0)
            pinned = {(layer_id, expert) for expert in board.told(place)}
            for key in gone:  # all come back, those that it waits for among them
                slots[where[key]] = hash(key)
                board.put(key, where[key])
            gone.clear()
            board.meet(place)
        thread.join()
        board.end()
        assert not faults
    assert taken > 100


def gated(pack: Pack, slots: int = 12, **changes: Any) -> GpuEngine:
    engine = open_gpu(pack, settings_of(pack, slots, **changes), gates=True)
    assert engine._rows._way() is Way.gated
    return engine


@pytest.mark.parametrize("slots", [8, 16])
def test_too_few_slots_for_a_layer_and_slots_for_all_have_no_gates(pack_of: PackOf, slots: int) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    with open_gpu(pack, settings_of(pack, slots), gates=True) as engine:
        assert list(engine.generate(REQUEST)) == alone(pack)
        assert {way for _, way in engine._rows._passes} == {Way.cut if slots == 8 else Way.whole}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("changes", [{}, {"host_cache_size": "50%"}])
def test_all_slots_hold_experts_of_the_layer_that_waits(tmp_path: Path, changes: dict[str, Any]) -> None:
    pack = build(tmp_path, "qwen2_moe", torch.bfloat16, num_hidden_layers=1, num_experts=16, num_experts_per_tok=1)
    with gated(pack, 9, max_parallel_transfers=1, speculate=False, **changes) as engine:
        assert list(engine.generate(REQUEST)) == alone(pack)


@pytest.mark.timeout(30)
def test_rows_that_nobody_asked_for_may_be_routed_elsewhere(pack_of: PackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last layer, where it does not come to the KV."""
    pack, inner, layers = pack_of("qwen2_moe", torch.bfloat16), TorchRows.route, itertools.count()
    wanted = alone(pack)

    def route(self: TorchRows, logits: Tensor, to: Routing, *rest: bool) -> None:
        if len(logits) == 8 and next(layers) % len(pack.spec.moe_layers) == len(pack.spec.moe_layers) - 1:
            logits = torch.cat([logits[:7], -logits[7:]])
        inner(self, logits, to, *rest)

    monkeypatch.setattr(TorchRows, "route", route)
    with gated(pack, speculate=False) as engine:
        assert list(engine.generate(REQUEST)) == wanted


@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v2"])  # the router is a kernel's, and the library's
def test_the_host_sees_the_same_routing_in_every_way(pack_of: PackOf, kind: str) -> None:
    pack, seen = pack_of(kind, torch.bfloat16), {}
    for way, slots in ((Way.whole, pack.spec.num_records), (Way.gated, pack.spec.num_records - 2), (Way.cut, 3)):
        settings = settings_of(pack, slots, speculate=False, max_parallel_transfers=1)
        with open_gpu(pack, settings, keep_trace=True, gates=True) as engine:
            assert engine._rows._way() is way
            list(engine.generate(REQUEST))
            layers = len(pack.spec.moe_layers)
            seen[way] = [
                sorted(step) for step in engine.trace()[layers:]
            ]  # of the rows; before them the prompt's block
    assert seen[Way.whole] == seen[Way.gated] == seen[Way.cut]
    assert len({expert for step in seen[Way.cut] for expert in step}) > pack.spec.top_k * layers


def test_experts_that_are_here_are_computed_while_others_come(pack_of: PackOf) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    made: list[Any] = []
    settings = settings_of(pack, 9, max_parallel_transfers=1, speculate=False, prefetch="none", eviction="lru")
    with open_gpu(pack, settings, made=made, gates=True) as engine:
        list(engine.generate(REQUEST))
        report = engine.report()
    calls = [experts for rows, experts in made[-1].calls if rows == 8]
    pairs = list(zip(calls[-28::2], calls[-27::2], strict=True))  # of a layer: those that were there, the others
    top_k = pack.spec.top_k
    assert all(first + second == top_k for first, second in pairs)
    assert len({first for first, _ in pairs}) > 1
    assert report["seconds"]["waiting_for_experts"] > 0


@pytest.mark.parametrize("changes", [{}, {"host_cache_size": "25%"}])
@pytest.mark.parametrize(("owner", "name"), [(ExpertCache, "hold"), (Hold, "close"), (SlotBoard, "told")])
def test_ctrl_c_while_a_pass_is_under_way_costs_nothing(
    pack_of: PackOf, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, changes: dict[str, Any]
) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    before, inner, left = threading.active_count(), getattr(owner, name), 0

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        found = inner(*arguments, **named)
        if threading.current_thread() is threading.main_thread():
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return found

    with gated(pack, **changes) as engine:
        monkeypatch.setattr(owner, name, interrupted)
        for place in (5, 6, 9):
            left = place
            with pytest.raises(KeyboardInterrupt):
                list(engine.generate(REQUEST))
        left = 0
        assert list(engine.generate(REQUEST)) == alone(pack)
        assert not engine.cache._residency.pins
    assert threading.active_count() == before


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("then", "changes"), [("another text", {}), ("another text", {"host_cache_size": "25%"}), ("the end", {})]
)
def test_ctrl_c_twice_leaves_a_pass_that_whatever_comes_next_ends_first(
    pack_of: PackOf, monkeypatch: pytest.MonkeyPatch, then: str, changes: dict[str, Any]
) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with gated(pack, **changes) as engine, monkeypatch.context() as patch:
        patch.setattr(SlotBoard, "told", interrupted)
        patch.setattr(SlotBoard, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate(REQUEST))
        board: Any = engine._rows._board
        over: list[bool] = []
        assert board.under_way
        patch.undo()
        if then == "another text":
            assert list(engine.generate(REQUEST)) == alone(pack)
        else:
            steps = Mock()
            steps.clear.side_effect = lambda: over.append(not board.under_way)
            engine._draft._steps = steps  # type: ignore[union-attr]
            engine.close()
            assert over == [True]


def test_a_shard_cut_while_running_opens_the_gates(tmp_path: Path) -> None:
    pack = build(tmp_path, "qwen2_moe", torch.bfloat16)
    before = threading.active_count()
    changes = {"max_parallel_transfers": 1, "host_cache_size": "12.5%"}
    with gated(pack, 10, speculate=False, **changes) as engine:
        tokens = engine.generate(REQUEST)
        next(tokens)
        for shard in pack.folder.glob("target-*.safetensors"):
            os.truncate(shard, 4096)
        with pytest.raises(ArtifactError, match=r"target-\d+\.safetensors \(layer"):
            list(tokens)
    assert threading.active_count() == before


@pytest.mark.timeout(30)
def test_a_reader_that_crashes_opens_the_gates(pack_of: PackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("of a policy")

    changes = {"max_parallel_transfers": 1, "host_cache_size": "50%"}
    with gated(pack_of("qwen2_moe", torch.bfloat16), 9, speculate=False, prefetch="none", **changes) as engine:
        tokens = engine.generate(REQUEST)
        next(tokens)
        monkeypatch.setattr(engine.cache._tickets._policy, "loaded", broken)
        with pytest.raises(ZeroDivisionError):
            list(tokens)


def test_a_pass_that_fails_is_not_waited_for(pack_of: PackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("an illegal memory access")

    with gated(pack_of("qwen2_moe", torch.bfloat16)) as engine:
        monkeypatch.setattr(HostGates, "open", broken)
        with pytest.raises(RuntimeError, match="illegal"):
            list(engine.generate(REQUEST))
        engine._rows._board.end()  # type: ignore[union-attr]  # a GPU that failed answers nothing
        engine._toolkit.accelerator._pass = None  # type: ignore[attr-defined]
