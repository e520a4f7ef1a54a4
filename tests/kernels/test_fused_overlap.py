"""The fused kernel in graphs, beside another of its kind, and on what a busy GPU leaves: it ends and is right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from moespeq_cli.bench.kernel_check import random_batch
from runtime.kernels import compile as compiling
from runtime.kernels.compile import Source, compile_cubin, load
from runtime.kernels.device import Gpu
from runtime.kernels.launch import Kernel
from runtime.kernels.shape import ExpertShape, WeightForm
from tests.kernels.conftest import PROBES
from tests.kernels.layers import DEVICE, Deadline, every_kind, generator, random_layer, recorded


@pytest.mark.usefixtures("nvrtc", "probes")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernel_that_holds_the_gpu_compiles(arch: str) -> None:
    assert compile_cubin(Source("hold.cu"), arch).resources["hold"].spill_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 16, 17])
@every_kind
def test_in_a_graph_with_other_inputs(form: WeightForm, tokens: int) -> None:
    """Layers follow one another, an odd number of them, so that each replay begins with the other buffer of h."""
    shape = ExpertShape(20, 4, 520, 264)
    layers = [random_layer(shape, form) for _ in range(3)]
    for layer in layers[1:]:
        layer.kernel = layers[0].kernel
    batch = random_batch(shape, tokens, generator())
    slots = [layer.slot_of.clone() for layer in layers]
    outs = [torch.empty_like(batch.x) for _ in layers]

    def queue() -> None:
        for layer, slot_of, out in zip(layers, slots, outs, strict=True):
            tensors = (batch.x, batch.top_k_index, batch.top_k_weights, out)
            layer.kernel.run(layer.pool, slot_of, *tensors)

    queue()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        queue()
    for seed in range(4):
        others = random_batch(shape, tokens, generator(seed))
        for old, new in zip(
            (batch.x, batch.top_k_index, batch.top_k_weights),
            (others.x, others.top_k_index, others.top_k_weights),
            strict=True,
        ):
            old.copy_(new)
        slots[1].copy_(layers[1].only(torch.arange(20, device=DEVICE) % 5 != seed))
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        found = [out.clone() for out in outs]
        for layer, slot_of, out in zip(layers, slots, found, strict=True):
            assert torch.equal(out, layer.run(batch, slot_of)), f"replay {seed}"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [(1, 1), (6, 16), (16, 3)], ids=str)
@every_kind
def test_two_instances_at_once_end_and_are_right(form: WeightForm, tokens: tuple[int, int]) -> None:
    """Each fills the GPU, so the other's blocks become resident late, a few at a time, in both directions."""
    shape = ExpertShape(60, 4, 520, 1032)
    layers = [random_layer(shape, form) for _ in tokens]
    batches = [random_batch(shape, count, generator(count)) for count in tokens]
    wanted = [layer.run(batch) for layer, batch in zip(layers, batches, strict=True)]
    streams = [torch.cuda.Stream() for _ in tokens]
    outs = [[torch.full_like(batch.x, torch.nan) for _ in range(50)] for batch in batches]
    graphs = [torch.cuda.CUDAGraph() for _ in tokens]
    for layer, batch, own, graph in zip(layers, batches, outs, graphs, strict=True):
        with torch.cuda.graph(graph):
            for out in own:
                layer.kernel.run(layer.pool, layer.slot_of, batch.x, batch.top_k_index, batch.top_k_weights, out)
    torch.cuda.synchronize()
    for _ in range(20):  # graphs side by side, then calls one by one from the host
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    Deadline().wait(*(recorded(stream) for stream in streams))
    for own, right in zip(outs, wanted, strict=True):
        assert all(torch.equal(out, right) for out in own)
        for out in own:
            out.fill_(torch.nan)
    torch.cuda.synchronize()
    for turn in range(50):
        for layer, batch, own, stream in zip(layers, batches, outs, streams, strict=True):
            with torch.cuda.stream(stream):
                layer.kernel.run(layer.pool, layer.slot_of, batch.x, batch.top_k_index, batch.top_k_weights, own[turn])
    Deadline().wait(*(recorded(stream) for stream in streams))
    for own, right in zip(outs, wanted, strict=True):
        assert all(torch.equal(out, right) for out in own)


class Holder:
    """Blocks that fill all but a few SMs until they are released, or for 10 s.

    Whatever is done meanwhile must have been done before once: loading a kernel or allocating may wait for the GPU.
    """

    def __init__(self, kernel: Kernel, free_sms: int) -> None:
        self.stream = torch.cuda.Stream()
        self.running, self.release = torch.zeros(2, dtype=torch.int32, device=DEVICE).split(1)
        blocks = kernel.gpu.num_sms - free_sms
        self.release.fill_(0)
        assert int(self.running) == 0
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            kernel.launch(blocks, (self.running, self.release, 10 * 10**9))
            self.ended = recorded(self.stream)
        end = time.monotonic() + 5
        while int(self.running) < blocks:  # read on the default stream, beside the blocks
            assert time.monotonic() < end, f"{int(self.running)} of {blocks} blocks run"

    def let_go(self) -> None:
        self.release.fill_(1)
        Deadline().wait(self.ended)


@pytest.fixture
def holding(gpu: Gpu) -> Iterator[Callable[[int], Holder]]:
    """Starts a Holder; its kernel is compiled from the tests' folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "kernel_folder", lambda: PROBES)
        kernel = Kernel(load(Source("hold.cu")), "hold", 32, gpu.smem_per_block_bytes)
    started: list[Holder] = []

    def start(free_sms: int) -> Holder:
        started.append(Holder(kernel, free_sms))
        return started[-1]

    yield start
    for holder in started:
        holder.let_go()


@pytest.mark.gpu
@pytest.mark.parametrize("free_sms", [1, 5])
@pytest.mark.parametrize("tokens", [1, 16])
@every_kind
def test_ends_on_the_few_multiprocessors_that_others_leave(
    form: WeightForm, tokens: int, free_sms: int, holding: Callable[[int], Holder]
) -> None:
    """Most blocks of the grid start only when others have ended, so none may wait for one that has not started."""
    shape = ExpertShape(20, 4, 520, 264)
    layer = random_layer(shape, form)
    batch = random_batch(shape, tokens, generator())
    wanted, stream = layer.run(batch), torch.cuda.Stream()
    outs = [torch.full_like(batch.x, torch.nan) for _ in range(3)]
    torch.cuda.synchronize()
    holder = holding(free_sms)
    with torch.cuda.stream(stream):
        for out in outs:
            layer.kernel.run(layer.pool, layer.slot_of, batch.x, batch.top_k_index, batch.top_k_weights, out)
        done = recorded(stream)
    Deadline(8).wait(done)
    assert not holder.ended.query(), "the GPU was not held to the end"
    holder.let_go()
    assert all(torch.equal(out, wanted) for out in outs)
