"""One run of `bench kernels` on the GPU: what is asked for is checked first, and a profile is written last."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moespeq_cli.bench import kernels
from moespeq_cli.bench.environment import environment, gpu_environment
from moespeq_cli.bench.kernel_candidate import Candidate
from moespeq_cli.bench.kernel_check import Checker
from moespeq_cli.bench.kernel_dense import dense_text, measure_dense
from moespeq_cli.bench.kernel_library import Grouped, Loop
from moespeq_cli.bench.kernel_ours import SEED_LAYOUT, Fused, Gemm
from moespeq_cli.bench.kernel_residual_time import measure_residual, residual_text
from moespeq_cli.bench.kernel_time import Machine, measure_machine
from moespeq_cli.bench.kernels import Plan, Result
from moespeq_cli.bench.tune import SAME, check_profile, write_profile
from runtime.artifacts.folder import require_writable, write_guard
from runtime.errors import InputError
from runtime.kernels.device import current_gpu
from runtime.kernels.fused import FusedConfig
from runtime.kernels.shape import BITS, WeightForm
from runtime.kernels.tuning import BACKENDS, INVARIANT_TOKENS

Advance = Callable[[], None]
TUNED_TOKENS = (1, 6)  # where the shape of the fused kernel is chosen
SHAPES = (
    FusedConfig(team=1),
    FusedConfig(team=4),
    FusedConfig(k_split=2),
    FusedConfig(k_split=8),
    FusedConfig(block_dim=256),
)


def candidates() -> list[Candidate]:
    """Every way to compute that the benchmark knows."""
    return [Fused(), Gemm(), Grouped(), Loop(), Fused(SEED_LAYOUT, "interleaved")]


DEFAULT = ("fused", "gemm", "grouped", "loop")  # the rest are variants


RESIDUAL = "residual"  # not a form of weights in itself: records beside codes
DENSE = "dense"  # nor this: what a decoding pass computes besides the experts


def parse_forms(names: Sequence[str] | None, group_size: int) -> list[WeightForm]:
    """Weight forms by name; INT4 in groups, INT8 with one scale a row.

    Raises:
        InputError: no such form.
        ShapeError: no such group size.
    """
    forms = []
    for name in dict.fromkeys(names or ("int4", "bf16")):
        if name in (RESIDUAL, DENSE):
            continue
        kind = next((kind for kind in BITS if kind == name), None)
        if kind is None:
            raise InputError(
                expected=f"a form of {', '.join((*BITS, RESIDUAL, DENSE))}", found=repr(name), mend="correct --form"
            )
        forms.append(WeightForm(kind, -1 if kind == "int8" else group_size if kind == "int4" else 128))
    return forms


def residual_form(names: Sequence[str] | None, group_size: int) -> WeightForm | None:
    """The bank's form where residual records are asked for, else None.

    Raises:
        ShapeError: no such group size.
    """
    return WeightForm("int4", group_size) if RESIDUAL in (names or ()) else None


def choose_candidates(names: Sequence[str] | None) -> list[Candidate]:
    """Candidates by name, in the order of the tables.

    Raises:
        InputError: no such candidate.
    """
    known = {candidate.name: candidate for candidate in candidates()}
    if unknown := [name for name in names or () if name not in known]:
        raise InputError(
            expected=f"a candidate of {', '.join(known)}", found=repr(unknown[0]), mend="correct --candidate"
        )
    return [candidate for name, candidate in known.items() if name in (names or DEFAULT)]


class KernelSession:
    """What is measured, and what was found.

    Args:
        plan: layers, forms and numbers of tokens.
        chosen: ways to compute.
    """

    def __init__(self, plan: Plan, chosen: Sequence[Candidate]) -> None:
        self._plan, self._candidates = plan, chosen
        self._machine: Machine | None = None
        self._results: list[Result] = []
        self._seed_results: list[Result] = []
        self._residual: list[Result] = []
        self._dense: list[Result] = []
        self._tuned: dict[str, Any] | None = None
        self._seconds = 0.0

    @classmethod
    def open(cls, plan: Plan, names: Sequence[str] | None, profile: Path | None) -> KernelSession:
        """Check all that can be checked before any work.

        Raises:
            KernelError: no GPU that will do, or no CuPy.
            InputError: an unknown candidate, no tokens, a file at `profile` to which nothing can be added, or a profile
                wanted without a candidate for few tokens.
            StorageError: no file can be written at `profile`.
        """
        if not plan.tokens or min(plan.tokens) < 1:
            raise InputError(
                expected="--tokens as whole numbers of 1 or more", found=f"{list(plan.tokens)}", mend="write 1,6,64"
            )
        chosen = choose_candidates(names)
        if profile is not None and profile.exists():
            check_profile(profile)
        current_gpu()
        if profile is not None:
            _require_tunable(plan, chosen)
            require_writable("the profile", profile)
        from runtime.kernels.read_bytes import ReadBytes

        ReadBytes()
        return cls(plan, chosen)

    def announcement(self) -> str:
        """What will be done."""
        names = ", ".join(candidate.name for candidate in self._candidates)
        return (
            f"{self._plan.num_cases} layers on {current_gpu().name}: {names} at "
            f"{', '.join(map(str, self._plan.tokens))} tokens{'' if self._plan.check else ', unchecked'}"
        )

    def measure(self, advance: Advance, seed_table: bool) -> None:
        """Check and time everything; `tune` comes after it.

        Raises:
            KernelError: a kernel gave a wrong answer.
            PlanError: a layer that does not fit.
        """
        begun = time.monotonic()
        self._machine = measure_machine()
        self._results = kernels.measure(self._plan, self._candidates, self._machine, advance)
        if self._plan.residual is not None:
            self._residual = measure_residual(self._plan, self._plan.residual, self._machine, advance)
        if self._plan.dense:
            from runtime.kernels.rows import RowKernels

            self._dense = measure_dense(self._plan.geometries, RowKernels(), self._machine, advance)
        if seed_table:
            self._seed_results = kernels.measure_seed_table(
                self._candidates, self._machine, advance, seed=self._plan.seed
            )
        self._seconds = time.monotonic() - begun

    def tune(self, profile: Path) -> None:
        """Choose the fused kernel's shape, and write it with the table of the fastest backends to a profile.

        What `measure` found stays whole, whatever fails here.

        Raises:
            KernelError: the fastest shape gave a wrong answer.
            StorageError: the profile cannot be written any more.
        """
        assert self._machine is not None
        begun = time.monotonic()
        table = kernels.tune(self._results, self._candidates)
        shape, shapes = self._best_shape(self._machine)
        facts, gpu = environment(), gpu_environment()
        notes = [
            f"{gpu['gpu']}, driver {gpu['driver']}, {facts['date']}",
            f"torch {facts['packages']['torch']}, CUDA {gpu['cuda']}, CuPy {gpu['cupy']}, "
            f"moespeq {facts['packages']['moespeq']}",
            facts["command"],
        ]
        with write_guard("the profile", profile.parent):
            profile.parent.mkdir(parents=True, exist_ok=True)
            write_profile(profile, table, shape, notes)
        self._tuned = {"kernel_dispatch": table.to_list(), "fused_kernel": dataclasses.asdict(shape), "shapes": shapes}
        self._seconds += time.monotonic() - begun

    def result(self) -> Result:
        """Everything, for JSON; `environment` with the GPU's facts."""
        assert self._machine is not None
        return {
            "gpu": gpu_environment(),
            "machine": dataclasses.asdict(self._machine),
            "cases": self._results,
            "seed_table": self._seed_results,
            "residual": self._residual,
            "dense": self._dense,
            "tuned": self._tuned,
            "seconds": self._seconds,
        }

    def text(self) -> str:
        """Everything, for reading: Markdown."""
        assert self._machine is not None
        machine, gpu = self._machine, gpu_environment()
        names = [candidate.name for candidate in self._candidates]
        labels = {geometry.name: geometry.label for geometry in self._plan.geometries}
        parts = [
            f"{gpu['gpu']}, {gpu['num_sms']} SMs, driver {gpu['driver']}, CUDA {gpu['cuda']}, CuPy {gpu['cupy']}. "
            f"Measured: reading {machine.read_gb_per_s:.0f} GB/s, copying {machine.copy_gb_per_s:.0f} GB/s (read and "
            f"written), BF16 products {machine.tflop_per_s:.0f} TFLOP/s. Microseconds a call: median (10-90 %)."
        ]
        for result in self._results:
            title = kernels.case_title(result, labels[result["geometry"]])
            parts.append(f"{title}\n\n{kernels.case_table(result, names)}")
        if self._residual:
            parts.append(residual_text(self._residual))
        if self._dense:
            parts.append(dense_text(self._dense))
        if self._seed_results:
            parts.append(
                f"Loop against ours, 60 experts, top-4, 2048 x inter\n\n{kernels.seed_table(self._seed_results)}"
            )
        return "\n\n".join(parts)

    def _best_shape(self, machine: Machine) -> tuple[FusedConfig, list[Result]]:
        """The fused kernel's shape that is fastest over all cases, and every shape's times.

        The default stays unless another shape is clearly faster.
        """
        shapes = {"default": FusedConfig()} | {f"shape {number}": config for number, config in enumerate(SHAPES)}
        fused: list[Candidate] = [Fused(config, name) for name, config in shapes.items()]
        plan = dataclasses.replace(self._plan, tokens=TUNED_TOKENS, check=False)
        rows = [row for case in kernels.measure(plan, fused, machine, lambda: None) for row in case["rows"]]
        best = kernels.best_shape([kernels.medians(row) for row in rows], "default", SAME)
        if best != "default":
            for geometry, form in self._plan.cases:
                Checker(
                    geometry.shape, form, [candidate for candidate in fused if candidate.name == best], "cuda"
                ).run()
        measured = [
            {"fused_kernel": dataclasses.asdict(config), "median_us": [kernels.medians(row).get(name) for row in rows]}
            for name, config in shapes.items()
        ]
        return shapes[best], measured


def _require_tunable(plan: Plan, chosen: Sequence[Candidate]) -> None:
    """Refuse a table of backends that would lack one for few tokens, which `tune.choose_ranges` finds out too late.

    Raises:
        InputError: naming the first layer for which no candidate will do.
    """
    few = max((tokens for tokens in plan.tokens if tokens <= INVARIANT_TOKENS), default=min(plan.tokens))
    able = [candidate for candidate in chosen if candidate.row_invariant and candidate.name in BACKENDS]
    for geometry, form in plan.cases:
        if not any(candidate.max_tokens(geometry.shape, form) >= few for candidate in able):
            raise InputError(
                expected=f"a candidate for --tune that computes {few} tokens of {geometry.name} in {form.kind} row by "
                "row alike",
                found=", ".join(candidate.name for candidate in chosen),
                mend="add --candidate fused",
            )
