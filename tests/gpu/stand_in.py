"""The processor in the GPU's place: the same engine, passes queued anew each time, kernels as a few lines of torch."""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from runtime.artifacts.pack import Pack
from runtime.artifacts.record import DraftFormat, DraftRecord, LinearFormat, target_layout
from runtime.artifacts.residual import ResidualEncoding
from runtime.config import RunSettings
from runtime.errors import ArtifactError
from runtime.gpu.accelerator import Bring, DeviceMemory, Forward, Mark, Run, plain
from runtime.gpu.engine import GpuEngine
from runtime.gpu.parts import Toolkit, load_pack
from runtime.gpu.plan import plan_gpu
from runtime.gpu.residual import ResidualTools
from runtime.kernels.dequant import plain_layout
from runtime.kernels.gate import FRESH, FreshList
from runtime.kernels.layout import SlotLayout
from runtime.kernels.reference import activate_torch, dequantize
from runtime.kernels.residual import ResidualPool
from runtime.kernels.residual_experts import RawSlots
from runtime.kernels.rows_reference import TorchRows
from runtime.kernels.tuning import INVARIANT_TOKENS
from runtime.memory.transfer import Landing
from runtime.model.families import MoeSpec


class Now:
    """Everything is done when it is queued, but for a pass with gates, which is done when its thread is."""

    def __init__(self, under_way: Pass | None) -> None:
        self._pass = under_way

    def done(self) -> bool:
        if self._pass is not None and self._pass.over:
            self.wait()  # for what it has to say
        return self._pass is None or self._pass.over

    def wait(self) -> None:
        if self._pass is not None:
            self._pass.wait()


class Pass:
    """A pass with gates: it runs while the host goes on, as on a GPU."""

    def __init__(self, forward: Callable[[], None]) -> None:
        self._forward, self._error = forward, None
        self._thread = threading.Thread(target=self._run, name="stand-in-pass")
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._forward()
        except BaseException as error:
            self._error = error


class HostGates:
    """See `GateOps`; a look at the board comes a moment after the telling."""

    def open(self, index: Tensor, told: Tensor | None, board: Tensor, here: Tensor) -> None:
        if told is not None:
            told.copy_(index)
        time.sleep(0)
        here.fill_(-1)
        for expert in set(index.flatten().tolist()):
            slot = int(board[expert])
            here[expert] = -1 if slot & FRESH else slot

    def wait(
        self, index: Tensor, board: Tensor, stop: Tensor, here: Tensor, late: Tensor, fresh: FreshList | None
    ) -> None:
        late.fill_(-1)
        if fresh is not None:
            fresh.slots.fill_(-1)
            fresh.faults.zero_()
        listed = 0
        for expert in sorted(set(index.flatten().tolist())):
            if here[expert] >= 0:
                continue
            while (slot := int(board[expert])) < 0 and not stop[0]:
                time.sleep(0)
            if slot >= 0 and slot & FRESH:
                slot ^= FRESH
                assert fresh is not None
                fresh.slots[listed], fresh.experts[listed] = slot, expert
                fresh.bytes[listed] = fresh.payload_bytes[expert]
                listed += 1
            late[expert] = slot


class LateCopy:
    """A copy that takes three looks."""

    def __init__(self, to: Tensor, source: Tensor) -> None:
        self._to, self._source, self._looks = to, source, 0
        self.num_bytes = len(to)
        to.fill_(0xFF)  # who reads before it has arrived gets NaN

    def done(self) -> bool:
        time.sleep(0)  # the pass that waits for it has the other thread
        if self._looks == 2:
            self._to.copy_(self._source)  # before it counts: an interrupt of the host stops no copy
        self._looks += 1
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
        self._pass: Pass | None = None

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def catch_up(self) -> None:
        pass

    def host(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*sizes, dtype=dtype)

    def seen(self, host: Tensor) -> Tensor:
        return host

    def fetch(self, to: Tensor, seen: Tensor) -> None:
        to.copy_(seen)

    def mark(self) -> Mark:
        return Now(self._pass)

    def forget_peak(self) -> None:
        """Nothing is measured."""

    def memory(self) -> DeviceMemory:
        return DeviceMemory()

    def let_go(self) -> None:
        """Nothing is recorded."""

    def start_copy(self, to: Tensor, source: Tensor) -> Landing:
        return LateCopy(to, source)

    def copy_in(self, to: Tensor, source: Tensor, pinned: bool) -> None:
        to.copy_(source)

    def copy_out(self, to: Tensor, source: Tensor, pinned: bool) -> None:
        to.copy_(source)

    def record(self, forward: Forward, cut: bool, gated: bool = False) -> Run:
        run = plain(forward, cut, self.mark)

        def start(bring: Bring | None) -> None:
            self._pass = Pass(lambda: run(bring))

        return start if gated else run


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
                gate_up, down = _weights(self._layout, pool[slot].numpy().tobytes())
                gate, up = (gate_up @ x[t].float()).chunk(2)
                h = activate_torch(gate, up, self._layout.shape.activation).bfloat16().float()
                sums[t, j] = down @ h
        if pairs is not None:
            pairs.copy_(sums)
        out.copy_((sums * top_k_weights[:, :, None]).sum(1))
        self.calls.append((len(x), len(here)))


@functools.lru_cache(maxsize=512)  # by what a slot holds: every call reads the same few
def _weights(layout: SlotLayout, slot: bytes) -> tuple[Tensor, Tensor]:
    slots = torch.frombuffer(bytearray(slot), dtype=torch.uint8)[None]
    if layout.form.is_coded:
        gate_up, down, _ = layout.unpack_codes(slots)
        return dequantize(gate_up, layout.form)[0].float(), dequantize(down, layout.form)[0].float()
    gate_up_rows, down_rows, _ = layout.views_bf16(slots)
    return gate_up_rows[0].float(), down_rows[0].float()


class HostPool(ResidualPool):
    """See `ResidualPool`: the reference decoder; a record is used only with the bytes that it was admitted with."""

    def admit(self, slots: Tensor, bank_slots: Tensor, payload_bytes: Tensor, faults: Tensor) -> None:
        triples = zip(slots.tolist(), bank_slots.tolist(), payload_bytes.tolist(), strict=True)
        for number, (slot, bank_slot, size) in enumerate(triples):
            if slot < 0:
                continue
            self.directory[slot, :8].view(torch.int64)[0] = size
            self.directory[slot, 8:40] = _bytes(_digest(self.records[slot]))
            faults[number] += self._exact(slot, bank_slot) is None

    def weights(self, slot: int, bank_slot: int) -> Tensor:
        """The BF16 slot of an expert whose record is admitted; one with faults means nothing."""
        assert torch.equal(self.directory[slot, 8:40], _bytes(_digest(self.records[slot]))), "not admitted"
        exact = self._exact(slot, bank_slot)
        return torch.zeros(plain_layout(self.layout).slot_bytes, dtype=torch.uint8) if exact is None else exact

    def decode(self, slot_of: Tensor, bank_slot_of: Tensor, active: Tensor, num_active: Tensor, out: Tensor) -> None:
        for expert in active[: int(num_active)].tolist():
            if slot_of[expert] >= 0 and bank_slot_of[expert] >= 0:
                out[expert] = self.weights(int(slot_of[expert]), int(bank_slot_of[expert]))

    def _exact(self, slot: int, bank_slot: int) -> Tensor | None:
        """None where the record has faults."""
        size = int(self.directory[slot, :8].view(torch.int64))
        key = _digest(self.records[slot]), _digest(self.bank[bank_slot]), size
        if key not in _decoded:
            try:
                _decoded[key] = self._decode(slot, bank_slot, size)
            except ArtifactError:
                _decoded[key] = None
        return _decoded[key]

    def _decode(self, slot: int, bank_slot: int, size: int) -> Tensor:
        shape = self.layout.shape
        spec = MoeSpec(
            "mixtral", 1, (0,), shape.num_experts, shape.top_k, shape.hidden_size, shape.moe_intermediate_size, "BF16",
            shape.has_bias, 0,
        )  # fmt: skip
        codes = dict(
            zip(("gate_up", "down"), self.layout.unpack_codes(self.bank[bank_slot : bank_slot + 1]), strict=False)
        )
        tensors, linears = {}, []
        for name, linear in codes.items():
            rows, scales = linear.codes[0], linear.scales[0]
            linears.append(LinearFormat(4, rows.shape[1] // scales.shape[1]))
            tensors[f"{name}.codes"] = rows[:, 0::2] | rows[:, 1::2] << 4
            tensors[f"{name}.scales"] = scales
            tensors[f"{name}.zeros"] = torch.full(scales.shape, 8, dtype=torch.uint8)
        layout = DraftFormat(*linears).layout(spec)
        draft = DraftRecord(layout, layout.fill(tensors))
        exact = ResidualEncoding().decode(self.records[slot], size, target_layout(spec), draft)
        return plain_layout(self.layout).pack_bf16(exact["gate_up"][None], exact["down"][None])[0]


_decoded: dict[tuple[bytes, bytes, int], Tensor | None] = {}  # by digests of record and codes, and length


def _digest(data: Tensor) -> bytes:
    return hashlib.sha256(data.numpy().data).digest()


def _bytes(digest: bytes) -> Tensor:
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


class TorchResidual:
    """See `ResidualExperts`: decode all that are here, and the BF16 stand-in.

    Attributes:
        calls: (rows, experts that were there as residual and as raw records) of each call.
    """

    def __init__(self, layout: SlotLayout) -> None:
        self.layout = layout
        self._plain = TorchKernels(plain_layout(layout), INVARIANT_TOKENS)
        self.calls: list[tuple[int, int, int]] = []

    def run(
        self,
        pool: ResidualPool,
        slot_of: Tensor,
        bank_slot_of: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        out: Tensor,
        *,
        raw: RawSlots | None = None,
        pairs: Tensor | None = None,
        resume: bool = False,
    ) -> None:
        assert isinstance(pool, HostPool) and pool.layout.form == self.layout.form
        wanted = set(top_k_index.flatten().tolist())
        slots = plain_layout(self.layout).new_pool(len(slot_of) + (0 if raw is None else len(raw.pool)), "cpu")
        here = [expert for expert in wanted if slot_of[expert] >= 0]
        for expert in here:
            slots[expert] = pool.weights(int(slot_of[expert]), int(bank_slot_of[expert]))
        own = torch.where(slot_of >= 0, torch.arange(len(slot_of), dtype=torch.int32), -1)
        if raw is not None:
            assert bool(((slot_of < 0) | (raw.slot_of < 0)).all())
            slots[len(slot_of) :] = raw.pool
            own = torch.where(raw.slot_of >= 0, raw.slot_of + len(slot_of), own)
        self.calls.append((len(x), len(here), sum(raw is not None and bool(raw.slot_of[e] >= 0) for e in wanted)))
        self._plain.run(slots, own.int(), x, top_k_index, top_k_weights, out, pairs=pairs, resume=resume)


def toolkit(
    made: list[TorchKernels] | None = None,
    needs_pinned: bool = False,
    records: list[TorchResidual] | None = None,
    gates: bool = False,
) -> Toolkit:
    """A toolkit on the processor.

    The kernels that it makes are added to `made`, the bank's before the target's, and those of residual records to
    `records`.

    With `needs_pinned` it is as if the driver had refused to pin the arena.
    """

    def kernels(layout: SlotLayout, num_slots: int, max_tokens: int, beside: bool = False) -> TorchKernels:
        one = TorchKernels(layout, max_tokens)
        if made is not None:
            made.append(one)
        return one

    def residual(layout: SlotLayout) -> TorchResidual:
        one = TorchResidual(layout)
        if records is not None:
            records.append(one)
        return one

    tools = ResidualTools(HostPool, residual)
    return Toolkit(Processor(needs_pinned), kernels, TorchRows(), tools, HostGates() if gates else None)


def open_gpu(
    pack: Pack,
    settings: RunSettings,
    keep_trace: bool = False,
    made: list[TorchKernels] | None = None,
    needs_pinned: bool = False,
    records: list[TorchResidual] | None = None,
    gates: bool = False,
) -> GpuEngine:
    """The GPU's engine on the processor, as if with 8 GB of memory of its own."""
    plan, tools = plan_gpu(pack, settings, device_bytes=8 * 10**9), toolkit(made, needs_pinned, records, gates)
    return GpuEngine(load_pack(pack, settings, plan, tools), settings, plan, tools, keep_trace)
