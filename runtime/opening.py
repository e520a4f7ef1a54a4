"""A pack to an engine: where it runs, what that takes, and the engine itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.engine import BaseEngine, Engine
from runtime.errors import InputError, KernelError, ShapeError
from runtime.kernels import device as devices
from runtime.memory.plan import MemoryPlan
from runtime.run_plan import plan_run


@dataclass(frozen=True, slots=True)
class Device:
    """Where a run computes.

    Attributes:
        name: for people.
        is_gpu: a GPU, with the kernels of `cuda/`.
        refused: why the GPU that is there was left alone, where nobody asked for the processor.
    """

    name: str
    is_gpu: bool
    refused: str | None = None


def usable_gpu() -> devices.Gpu:
    """The current GPU.

    Raises:
        KernelError: there is none that will do, or no CuPy.
    """
    gpu = devices.current_gpu()
    if find_spec("cupy") is None:
        raise KernelError(
            expected="CuPy, which launches the kernels", found="no such package", mend="pip install 'moespeq[cuda]'"
        )
    return gpu


def choose_device(pack: Pack, settings: RunSettings) -> Device:
    """The device of a run: as asked for, or a GPU where there is one that computes this pack.

    Raises:
        KernelError: a GPU is asked for, and there is none that will do, or no CuPy.
        InputError, ShapeError: a GPU is asked for, and it does not compute this pack.
    """
    if settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available()):
        return Device("the processor", False)
    from runtime.gpu.plan import refuse

    try:
        gpu = usable_gpu()
        refuse(pack, settings, gpu)
    except (KernelError, InputError, ShapeError) as error:
        if settings.device == "cuda":
            if isinstance(error, KernelError):  # whoever raises it knows nothing of --device, which a profile may set
                error.mend += "; or run with --device cpu"
            raise
        return Device("the processor", False, refused=str(error))
    return Device(gpu.name, True)


def plan_on(device: Device, pack: Pack, settings: RunSettings) -> MemoryPlan:
    """What goes where.

    Raises:
        PlanError: it does not fit; the message names what would.
    """
    if not device.is_gpu:
        return plan_run(pack, settings)
    from runtime.gpu.plan import plan_gpu

    return plan_gpu(pack, settings)


def open_engine(
    device: Device,
    pack: Pack,
    settings: RunSettings,
    plan: MemoryPlan,
    keep_trace: bool = False,
    done: Callable[[int], None] = lambda num_bytes: None,
) -> BaseEngine:
    """Load everything that stays in memory.

    Args:
        device: from `choose_device`.
        pack: an opened pack.
        settings: of the run.
        plan: from `plan_on`.
        keep_trace: whether to keep every demand of the target.
        done: told the bytes of each exact expert that a run on a GPU brings to the host's memory; nothing where a part
            of them stays on disk.

    Raises:
        ArtifactError: a file of the pack is damaged.
        InputError: the model cannot be built.
        PlanError: memory that was planned for cannot be had.
    """
    if not device.is_gpu:
        return Engine(pack, settings, plan, keep_trace)
    from runtime.gpu.engine import GpuEngine
    from runtime.gpu.parts import Toolkit, load_pack

    toolkit = Toolkit.cuda(settings)
    return GpuEngine(load_pack(pack, settings, plan, toolkit, done), settings, plan, toolkit, keep_trace)


def open_folder(folder: Path, settings: RunSettings, keep_trace: bool = False) -> BaseEngine:
    """Open a pack, choose where it runs, plan, and load: what a library user needs.

    Raises:
        ArtifactError: the pack is unfinished or damaged.
        InputError, KernelError, PlanError: as the steps do.
    """
    pack = Pack.open(folder)
    device = choose_device(pack, settings)
    return open_engine(device, pack, settings, plan_on(device, pack, settings), keep_trace)
