"""How long calls take on the GPU: replays of a CUDA graph of many, over weights that the L2 cache does not hold."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.bench.kernel_candidate import Batch, Call, Candidate, Layer
from moespeq_cli.bench.kernel_check import random_batch
from moespeq_cli.bench.kernel_data import random_experts
from runtime.errors import PlanError
from runtime.kernels.shape import ExpertShape, WeightForm

REPLAYS, WARM_UPS = 25, 3
CALLS = 48  # in a graph, fewer where they take long
LEAST_CALLS = 6  # with routings of their own
GRAPH_US = 4_000.0  # about what a graph should take at most
L2_TIMES = 4  # bytes between two uses of the same weights, in sizes of the L2 cache
MAX_LAYERS = 32


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds a call over replays of a graph.

    Attributes:
        median_us, low_us, high_us: the median, and where 10 and 90 % of the replays lie.
        deciles_us: from the fastest to the slowest, 11 values.
        replays: that were timed.
        calls: in the graph.
    """

    median_us: float
    low_us: float
    high_us: float
    deciles_us: tuple[float, ...]
    replays: int
    calls: int

    @classmethod
    def of(cls, times: Sequence[float], calls: int) -> Times:
        """Of microseconds a call, one a replay."""
        cuts = (min(times), *statistics.quantiles(times, n=10, method="inclusive"), max(times))
        return cls(statistics.median(times), cuts[1], cuts[9], cuts, len(times), calls)


@dataclass(frozen=True, slots=True)
class Machine:
    """What this GPU reaches, measured in this run.

    Attributes:
        read_gb_per_s: of a kernel that reads and does nothing else.
        copy_gb_per_s: of an elementwise kernel from one buffer to another, bytes read and written together.
        tflop_per_s: of a large BF16 matrix product on random data.
        l2_bytes: of the cache that weights must not stay in.
    """

    read_gb_per_s: float
    copy_gb_per_s: float
    tflop_per_s: float
    l2_bytes: int

    def floor_us(self, num_bytes: float, flops: float) -> float:
        """The time under which nothing of so many bytes and operations ends."""
        return max(num_bytes / self.read_gb_per_s / 1e3, flops / self.tflop_per_s / 1e6)


def replay(calls: Sequence[Call], replays: int = REPLAYS) -> Times:
    """Time a graph of calls.

    Args:
        calls: captured in this order on one stream.
        replays: timed ones; some more go before.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())  # which may still fill what the calls read
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(WARM_UPS + replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(calls))
    return Times.of(times[WARM_UPS:], len(calls))


def measure_machine() -> Machine:
    """Bandwidths and matrix rate of the current GPU; a few gigabytes, a second."""
    free, _ = torch.cuda.mem_get_info()
    read, copy = _bandwidths(min(4 << 30, free // 4) // 4096 * 4096)
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return Machine(read, copy, _matrix_rate(8192), l2_bytes)


def _bandwidths(size_bytes: int) -> tuple[float, float]:
    """GB/s of reading a buffer, and of copying one half of it to the other."""
    from runtime.kernels.read_bytes import ReadBytes

    data = torch.empty(size_bytes, dtype=torch.uint8, device="cuda").random_()
    read = ReadBytes()
    low, high = data.view(torch.int64).chunk(2)

    def reading() -> None:
        read(data)

    def copying() -> None:
        torch.bitwise_not(high, out=low)  # a kernel: a copy in a graph is left to a slower engine

    return size_bytes / replay([reading] * 4).median_us / 1e3, size_bytes / replay([copying] * 4).median_us / 1e3


def _matrix_rate(size: int) -> float:
    """TFLOP/s of a square BF16 product of random matrices."""
    a, b, out = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def multiplying() -> None:
        torch.matmul(a, b, out=out)

    return 2 * size**3 / replay([multiplying] * 4).median_us / 1e6


def weight_bytes(shape: ExpertShape, form: WeightForm) -> int:
    """The fewest bytes of one expert: codes, scales and biases without any padding."""
    hidden, inner = shape.hidden_size, shape.moe_intermediate_size
    total = shape.weights_per_expert * form.bits // 8
    if form.is_coded:
        total += 2 * (2 * inner * form.groups(hidden) + hidden * form.groups(inner))
    return total + (2 * (2 * inner + hidden) if shape.has_bias else 0)


def layers_needed(shape: ExpertShape, form: WeightForm, num_tokens: int, l2_bytes: int) -> int:
    """Layers to take in turn, so that L2 holds no weights from one use to the next under random routing."""
    missed = (1 - shape.top_k / shape.num_experts) ** num_tokens
    experts = max(shape.top_k, shape.num_experts * (1 - missed))
    return min(MAX_LAYERS, max(2, -(-L2_TIMES * l2_bytes // int(experts * weight_bytes(shape, form)))))


class Bank:
    """Layers of one geometry and form in device memory: the same random weights at different places.

    Args:
        shape, form: of the layers.
        wanted: layers; fewer are made where memory ends, 2 at least.
        reserve_bytes: memory to leave free.
        generator: of the weights.

    Raises:
        PlanError: not even two layers fit.
    """

    def __init__(
        self, shape: ExpertShape, form: WeightForm, wanted: int, reserve_bytes: int, generator: torch.Generator
    ) -> None:
        self.shape, self.form = shape, form
        slot_of = torch.randperm(shape.num_experts, generator=generator, device=generator.device).int()
        first = random_experts(shape, form, generator).pack(slot_of, shape.num_experts)
        if first.is_cuda:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            fits = 1 + max(0, free - reserve_bytes) // first.numel()
            if fits < 2:
                raise PlanError(
                    expected=f"memory for two layers of {first.numel() / 1e9:.1f} GB and {reserve_bytes / 1e9:.1f} GB "
                    "of buffers",
                    found=f"{(free + first.numel()) / 1e9:.1f} GB free",
                    mend="leave this geometry or form out, or stop what else uses the GPU",
                )
            wanted = min(wanted, fits)
        self.layers = [Layer(first, slot_of)] + [Layer(first.clone(), slot_of.clone()) for _ in range(wanted - 1)]


def buffer_bytes(shape: ExpertShape, form: WeightForm, num_tokens: int) -> int:
    """About what the candidates want beside the layers: every expert in BF16 once, and rows of pairs."""
    plain = 2 * shape.weights_per_expert * shape.num_experts if form.is_coded else 0
    rows = 24 * num_tokens * shape.top_k * (shape.hidden_size + shape.moe_intermediate_size)
    return plain + 2 * rows + (1 << 30)


@dataclass(frozen=True, slots=True)
class Work:
    """Calls to be timed: batches to be taken in turn with layers, and what they must move at least."""

    batches: list[Batch]
    layers: list[Layer]
    out: Tensor
    experts: float
    num_bytes: float
    flops: float


def make_work(bank: Bank, num_tokens: int, machine: Machine, generator: torch.Generator) -> Work:
    """Random tokens, and random routing for every call."""
    shape, form = bank.shape, bank.form
    layers = bank.layers[: layers_needed(shape, form, num_tokens, machine.l2_bytes)]
    flops = float(shape.flops_per_pair * num_tokens * shape.top_k)
    most = shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** num_tokens)
    floor_us = machine.floor_us(most * weight_bytes(shape, form), flops)
    count = max(len(layers), min(CALLS, int(GRAPH_US / floor_us)))
    first = random_batch(shape, num_tokens, generator)
    batches = [first]
    for _ in range(count - 1):
        other = random_batch(shape, num_tokens, generator)
        batches.append(Batch(first.x, other.top_k_index, other.top_k_weights))
    experts = statistics.mean(len(torch.unique(batch.top_k_index)) for batch in batches)
    return Work(batches, layers, torch.empty_like(first.x), experts, experts * weight_bytes(shape, form), flops)


def time_candidate(candidate: Candidate, bank: Bank, work: Work) -> Times:
    """Time one candidate on calls that others are timed on too."""
    prepared = candidate.prepare(bank.shape, bank.form, len(work.batches[0]))
    layers = work.layers
    calls = [prepared.bind(layers[number % len(layers)], batch, work.out) for number, batch in enumerate(work.batches)]
    least = max(len(layers), min(LEAST_CALLS, len(calls)))
    each_us = replay(calls[:least], replays=3).median_us
    times = replay(calls[: max(least, int(GRAPH_US / each_us))])
    del calls, prepared
    gc.collect()  # graphs and buffers of gigabytes should not wait for the next candidate
    torch.cuda.empty_cache()
    return times


def time_row(
    candidates: Sequence[Candidate], bank: Bank, num_tokens: int, machine: Machine, seed: int
) -> dict[str, Any]:
    """All candidates at one number of tokens, with the floor: a row of the results."""
    generator = torch.Generator(device=bank.layers[0].pool.device).manual_seed(seed)
    work = make_work(bank, num_tokens, machine, generator)
    times = {
        candidate.name: asdict(time_candidate(candidate, bank, work))
        for candidate in candidates
        if candidate.max_tokens(bank.shape, bank.form) >= num_tokens
    }
    return {
        "tokens": num_tokens,
        "experts": work.experts,
        "layers": len(work.layers),
        "bytes": work.num_bytes,
        "flops": work.flops,
        "floor_us": machine.floor_us(work.num_bytes, work.flops),
        "bound": "bytes" if machine.floor_us(work.num_bytes, 0) >= machine.floor_us(0, work.flops) else "flops",
        "times": times,
    }
