"""What a run on a GPU is made of: what computes, and a model that was brought to where it computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from runtime.artifacts.heat import Heat
from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.engine import checked_at_once
from runtime.gpu.accelerator import Accelerator, Cuda
from runtime.gpu.bank import ResidentBank, pack_layers
from runtime.gpu.geometry import expert_shape
from runtime.gpu.host_tier import Arena, HostCache, HostTier
from runtime.gpu.model import DeviceModel
from runtime.gpu.residual import ResidualTools
from runtime.gpu.residual_facts import ResidualFacts
from runtime.gpu.shortage import shortage
from runtime.gpu.target import ROWS
from runtime.kernels.dispatch import Backend, ExpertKernels
from runtime.kernels.gate import GateKernels, GateOps
from runtime.kernels.layout import SlotLayout
from runtime.kernels.residual import ResidualPool
from runtime.kernels.residual_experts import ResidualExperts
from runtime.kernels.rows import RowKernels, RowOps
from runtime.kernels.shape import Activation
from runtime.memory.plan import MemoryPlan
from runtime.memory.sizes import format_size
from runtime.memory.slots import SlotPool
from runtime.memory.store import RecordFacts, RecordStore

_FREE = "free the GPU's memory: what was planned for is taken by now"


class MakeKernels(Protocol):
    """Makes what computes layers of a layout."""

    def __call__(self, layout: SlotLayout, num_slots: int, max_tokens: int, beside: bool = False) -> Backend:
        """From pools of so many slots, for up to so many tokens; `beside` what is queued next, or alone."""


@dataclass(frozen=True, slots=True)
class Toolkit:
    """What computes.

    Attributes:
        accelerator: the device.
        kernels: makes what computes layers of a layout.
        rows: computes the dense part of decoding passes.
        residual: what computes from residual records.
        gates: let passes wait for experts on the device; None where each layer is queued when its experts are there.
    """

    accelerator: Accelerator
    kernels: MakeKernels
    rows: RowOps
    residual: ResidualTools
    gates: GateOps | None = None

    @classmethod
    def cuda(cls, settings: RunSettings, graphs: bool = True) -> Toolkit:
        """The current GPU with the kernels of `cuda/`."""

        def kernels(layout: SlotLayout, num_slots: int, max_tokens: int, beside: bool = False) -> Backend:
            table, config = settings.kernel_dispatch, settings.fused_kernel
            return ExpertKernels(layout, num_slots, max_tokens, table, config, beside)

        residual = ResidualTools(ResidualPool, lambda layout: ResidualExperts(layout, settings.fused_kernel))
        return cls(Cuda(graphs), kernels, RowKernels(), residual, GateKernels() if graphs else None)


@dataclass(frozen=True, slots=True)
class Parts:
    """A model, brought to where a run wants it.

    Attributes:
        model: the dense part, on the device.
        activation: of the experts.
        bank: the draft's experts; None where neither speculation nor records need them.
        store: sizes and names of the exact experts' records.
        tier: has them in this machine's memory.
        name: for the report.
        close: lets go of files, and of the device's memory where the model is this one run's.
        heat: how often each expert was used on a profile's texts, where the pack knows.
        residual: which records are residual ones; None where all are raw.
    """

    model: DeviceModel
    activation: Activation
    bank: ResidentBank | None
    store: RecordFacts
    tier: HostTier
    name: str
    close: Callable[[], None]
    heat: Heat | None = None
    residual: ResidualFacts | None = None


def load_pack(
    pack: Pack,
    settings: RunSettings,
    plan: MemoryPlan,
    toolkit: Toolkit,
    done: Callable[[int], None] = lambda num_bytes: None,
) -> Parts:
    """Bring a pack's model to the device and its exact experts to this machine's memory.

    Args:
        pack: of BF16 experts.
        settings: of the run.
        plan: says how many records the host keeps.
        toolkit: what computes.
        done: told the bytes of each record read.

    Raises:
        ArtifactError: a file of the pack is damaged.
        PlanError: memory that was planned for cannot be had.
    """
    pack.check_dense()
    device, activation = toolkit.accelerator.device, plan_activation(pack)
    shape = expert_shape(pack.spec, activation)
    capacity = plan.context_tokens
    names = pack.dense_names()
    with shortage(f"{format_size(plan.dense_bytes)} of device memory for the dense weights", _FREE):
        model = DeviceModel(pack.config_folder, pack.spec, pack.read_dense, names, device, capacity, toolkit.rows)
    bank, residual = None, ResidualFacts.of(pack)
    if drafts(settings) or residual is not None:
        bank = make_bank(pack_layers(pack, shape, device, settings.direct_io), toolkit, model)
    store = RecordStore(pack.target_locations(), direct=settings.direct_io)
    try:
        keys, readers = pack.spec.expert_keys(), max(4, settings.max_parallel_transfers)
        tier: HostTier
        if plan.host_slots >= len(keys):
            tier = Arena.load(store, keys, readers, done)  # which compares every checksum
        else:
            if checked_at_once(settings, plan):
                store.check_all(SlotPool(1, store.max_record_bytes).buffer(0))
            tier = HostCache(store, plan.host_slots, settings.max_parallel_transfers)
    except BaseException:
        store.close()
        raise

    def close() -> None:
        store.close()
        model.unload()
        if bank is not None:
            bank.unload()

    return Parts(model, activation, bank, store, tier, str(pack.folder), close, pack.heat, residual)


def drafts(settings: RunSettings) -> bool:
    """Whether a run speculates."""
    return settings.speculate and settings.prefetch_window > 0


def make_bank(layers: Any, toolkit: Toolkit, model: DeviceModel) -> ResidentBank:
    """The draft's experts from slots on the device, beside what the model computes itself."""

    def kernels(layout: SlotLayout) -> Backend:
        return toolkit.kernels(layout, layout.shape.num_experts, ROWS, beside=model.shares)

    with shortage("device memory for the draft's experts", f"{_FREE}, or run without a draft (--no-speculate)"):
        return ResidentBank(layers, kernels, toolkit.accelerator.device)


@functools.lru_cache(maxsize=1)  # a start asks three times, and each answer builds the model without its weights
def plan_activation(pack: Pack) -> Activation:
    """The activation of a pack's experts, from its configuration alone.

    Raises:
        InputError: one that the kernels do not compute, attention that is not computed on a GPU, or a model that
            transformers cannot build.
    """
    from runtime.gpu import attention
    from runtime.gpu.geometry import activation_of
    from runtime.model import loader
    from runtime.model.experts import ExpertMath, find_experts

    model = loader.build(pack.config_folder, torch.bfloat16, pack.spec)
    attention.refuse(model)
    module = find_experts(loader.decoder_layers(model)[pack.spec.moe_layers[0]])
    assert module is not None
    return activation_of(ExpertMath(module))
