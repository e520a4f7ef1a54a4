"""Solvers behind one interface: ours for a batch of linears, and auto-gptq's own, a linear at a time."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moespeq_cli.quantize import gptq
from moespeq_cli.quantize.gptq import DAMP_STEP, MAX_DAMP_PERCENT, Solution, SolverSettings
from runtime.artifacts.gptq_format import effective_group_size
from runtime.errors import InputError

SOLVERS = ("batched", "auto-gptq")
_ALONE = threading.Lock()  # auto-gptq is made for one thread, and so is what stands in for a GPU below
_SingularError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


class Solver(Protocol):
    """Turns weights and Hessians into codes."""

    @property
    def name(self) -> str: ...

    def solve(self, weights: Tensor, hessians: Tensor, tokens: list[int], settings: SolverSettings) -> Solution:
        """Quantise linears of one shape: weights [E, out, in], Hessians [E, in, in], the tokens behind each."""


class BatchedSolver:
    """All experts of a layer in one batch, on any device."""

    name = "batched"

    def solve(self, weights: Tensor, hessians: Tensor, tokens: list[int], settings: SolverSettings) -> Solution:
        return gptq.solve(weights, hessians, tokens, settings)


class AutoGptqSolver:
    """auto-gptq 0.7.1's `GPTQ` class, fed the Hessian that our own solver would get.

    The Hessian is set, not summed by its `add_batch`: that sums the same products (a test compares the two), but would
    want every token of every expert handed over again. Experts with too few tokens are rounded by our own code, for
    which auto-gptq has no counterpart.
    """

    name = "auto-gptq"

    def __init__(self) -> None:
        self._gptq: Any = import_auto_gptq("quantization.gptq").GPTQ

    def solve(self, weights: Tensor, hessians: Tensor, tokens: list[int], settings: SolverSettings) -> Solution:
        result = gptq.round_solution(weights, settings)
        for expert, count in enumerate(tokens):
            if count >= settings.min_tokens and count > 0 and bool(torch.isfinite(hessians[expert]).all()):
                percent = settings.first_damping(weights.shape[-1], count)
                self._solve_one(result, expert, weights[expert], hessians[expert], percent, settings)
        return result

    def _solve_one(
        self, result: Solution, expert: int, weight: Tensor, hessian: Tensor, percent: float, settings: SolverSettings
    ) -> None:
        size = effective_group_size(weight.shape[1], settings.group_size, bits=settings.bits)
        while True:
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
            solver = self._gptq(linear)
            solver.quantizer.configure(settings.bits, perchannel=True, sym=True, mse=False)
            solver.H = hessian.clone()
            solver.nsamples = 1
            try:
                with _ALONE, _without_cuda():
                    scales, zeros, _ = solver.fasterquant(
                        blocksize=settings.block_size,
                        percdamp=percent,
                        group_size=size,
                        actorder=False,
                        static_groups=True,
                    )
                break
            except _SingularError:
                if percent >= MAX_DAMP_PERCENT:
                    return  # stays rounded to nearest
                percent = min(percent * DAMP_STEP, MAX_DAMP_PERCENT)
        steps = scales.repeat_interleave(size, 1)
        codes = torch.round(linear.weight / steps) + zeros.repeat_interleave(size, 1)
        result.codes[expert] = codes.clamp(0, (1 << settings.bits) - 1).to(torch.uint8)
        result.scales[expert] = scales.to(torch.float16)
        result.zeros[expert] = zeros.to(torch.uint8)
        result.methods[expert] = "gptq"
        result.damping[expert] = round(percent, 6)


def make_solver(name: str) -> Solver:
    """A solver by its name.

    Raises:
        InputError: no such solver, or auto-gptq is not installed.
    """
    if name == "batched":
        return BatchedSolver()
    if name == "auto-gptq":
        return AutoGptqSolver()
    raise InputError(expected=f"--solver {' or '.join(SOLVERS)}", found=repr(name), mend="pass one of these")


def auto_gptq_available() -> bool:
    """Whether auto-gptq is installed; its own import is not tried, as transformers 5 breaks it."""
    return "auto_gptq" in sys.modules or importlib.util.find_spec("auto_gptq") is not None


def import_auto_gptq(module: str) -> Any:
    """Import one module of auto-gptq without running the package's `__init__`.

    The `__init__` imports names that transformers 5 no longer has, while the modules of the algorithm and the packer
    need none of them. So an empty package of that name, which knows where the files are, goes before it.

    Raises:
        InputError: auto-gptq is not installed.
    """
    if "auto_gptq" not in sys.modules:
        spec = importlib.util.find_spec("auto_gptq")
        if spec is None or spec.submodule_search_locations is None:
            raise InputError(
                expected="auto-gptq 0.7.1 for --solver auto-gptq",
                found="no such package",
                mend="BUILD_CUDA_EXT=0 pip install --no-deps --no-binary auto-gptq auto-gptq==0.7.1, "
                "or leave --solver out",
            )
        package = types.ModuleType("auto_gptq")
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules["auto_gptq"] = package
    return importlib.import_module(f"auto_gptq.{module}")


@contextlib.contextmanager
def _without_cuda() -> Iterator[None]:
    """Let auto-gptq wait for a GPU that is not there."""
    if torch.cuda.is_available():
        yield
        return
    real = torch.cuda.synchronize
    torch.cuda.synchronize = lambda *_: None
    try:
        yield
    finally:
        torch.cuda.synchronize = real
