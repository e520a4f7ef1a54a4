"""The processor in the GPU's place: the same engine, passes queued anew each time, kernels as a few lines of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.gpu.accelerator import DeviceMemory, Forward, Mark, Run, plain
from runtime.gpu.engine import GpuEngine, Toolkit, load_pack
from runtime.gpu.plan import plan_gpu
from runtime.kernels.layout import SlotLayout
from runtime.kernels.reference import activate_torch, dequantize
from runtime.kernels.rows_reference import TorchRows
from runtime.memory.transfer import Landing


class Now:
    """Everything is done when it is queued."""

    def wait(self) -> None:
        """Nothing to wait for."""


class LateCopy:
    """A copy that takes three looks."""

    def __init__(self, to: Tensor, source: Tensor) -> None:
        self._to, self._source, self._looks = to, source, 0
        self.num_bytes = len(to)
        to.fill_(0xFF)  # who reads before it has arrived gets NaN

    def done(self) -> bool:
        self._looks += 1
        if self._looks == 3:
            self._to.copy_(self._source)
        return self._looks >= 3

    def wait(self) -> None:
        while not self.done():
            pass


class Processor:
    """See `Accelerator`."""

    device = torch.device("cpu")

    def __init__(self, needs_pinned: bool = False) -> None:
        self.needs_pinned = needs_pinned
        self.meanwhile: Callable[[], None] | None = None

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def host(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*sizes, dtype=dtype)

    def seen(self, host: Tensor) -> Tensor:
        return host

    def fetch(self, to: Tensor, seen: Tensor) -> None:
        to.copy_(seen)

    def mark(self) -> Mark:
        return Now()

    def forget_peak(self) -> None:
        """Nothing is measured."""

    def memory(self) -> DeviceMemory:
        return DeviceMemory()

    def let_go(self) -> None:
        """Nothing is recorded."""

    def start_copy(self, to: Tensor, source: Tensor, urgent: bool) -> Landing:
        return LateCopy(to, source)

    def copy_in(self, to: Tensor, source: Tensor, pinned: bool) -> None:
        to.copy_(source)

    def record(self, forward: Forward, cut: bool) -> Run:
        return plain(forward, cut, self.mark)


class TorchKernels:
    """The kernels' contract: pairs one by one in float32, rounded where the kernels round.

    Attributes:
        calls: (rows, experts that were there) of each call.
    """

    def __init__(self, layout: SlotLayout, max_tokens: int) -> None:
        self._layout, self._max_tokens = layout, max_tokens
        self.calls: list[tuple[int, int]] = []

    def run(
        self,
        pool: Tensor,
        slot_of: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        out: Tensor,
        *,
        pairs: Tensor | None = None,
        resume: bool = False,
    ) -> None:
        assert len(x) <= self._max_tokens
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and top_k_index.dtype == torch.int32
        sums = torch.zeros(*top_k_index.shape, x.shape[1])
        here = set()
        for t, row in enumerate(top_k_index.tolist()):
            for j, expert_id in enumerate(row):
                slot = int(slot_of[expert_id])
                if slot < 0:
                    sums[t, j] = pairs[t, j] if resume and pairs is not None else 0
                    continue
                here.add(expert_id)
                gate_up, down = self._weights(pool[slot : slot + 1])
                gate, up = (gate_up @ x[t].float()).chunk(2)
                h = activate_torch(gate, up, self._layout.shape.activation).bfloat16().float()
                sums[t, j] = down @ h
        if pairs is not None:
            pairs.copy_(sums)
        out.copy_((sums * top_k_weights[:, :, None]).sum(1))
        self.calls.append((len(x), len(here)))

    def _weights(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        if self._layout.form.is_coded:
            gate_up, down, _ = self._layout.unpack_codes(slots)
            return tuple(dequantize(part, self._layout.form)[0].float() for part in (gate_up, down))  # type: ignore[return-value]
        gate_up_rows, down_rows, _ = self._layout.views_bf16(slots)
        return gate_up_rows[0].float(), down_rows[0].float()


def toolkit(made: list[TorchKernels] | None = None, needs_pinned: bool = False) -> Toolkit:
    """A toolkit on the processor; the kernels that it makes are added to `made`, the bank's before the target's.

    With `needs_pinned` it is as if the driver had refused to pin the arena.
    """

    def kernels(layout: SlotLayout, num_slots: int, max_tokens: int) -> TorchKernels:
        one = TorchKernels(layout, max_tokens)
        if made is not None:
            made.append(one)
        return one

    return Toolkit(Processor(needs_pinned), kernels, TorchRows())


def open_gpu(
    pack: Pack,
    settings: RunSettings,
    keep_trace: bool = False,
    made: list[TorchKernels] | None = None,
    needs_pinned: bool = False,
) -> GpuEngine:
    """The GPU's engine on the processor, as if with 8 GB of memory of its own."""
    plan, tools = plan_gpu(pack, settings, device_bytes=8 * 10**9), toolkit(made, needs_pinned)
    return GpuEngine(load_pack(pack, settings, plan, tools), settings, plan, tools, keep_trace)
