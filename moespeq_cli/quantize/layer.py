"""All experts of one layer: from weights and routed tokens to packed tensors and a report."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moespeq_cli.quantize.gptq import Solution, SolverSettings, round_solution
from moespeq_cli.quantize.hessian import TokenLog, hessian
from moespeq_cli.quantize.report import LinearReport, relative_errors
from moespeq_cli.quantize.solver import Solver
from runtime.artifacts.gptq_format import dequantize, effective_group_size, pack_linear
from runtime.artifacts.quantized import BIASES, LayerFormat, linear_name
from runtime.errors import InputError
from runtime.model.experts import ExpertMath
from runtime.model.families import PROJECTIONS, LayerExperts
from runtime.threads import spread

WORKING_BYTES = 2 << 30  # for Hessians and float32 copies; decides how many experts are solved together


@dataclass(slots=True)
class LayerResult:
    """The tensors of a layer under their names in the folder, and what was done to each linear."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    linears: list[LinearReport] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LayerQuantizer:
    """Quantises one layer after another with the same means."""

    solver: Solver | None  # None rounds everything to nearest
    device: torch.device

    def quantize(
        self,
        layer_id: int,
        experts: LayerExperts,
        math: ExpertMath,
        log: TokenLog,
        form: LayerFormat,
        settings: SolverSettings,
    ) -> LayerResult:
        """Quantise a layer's experts, as many at a time as the working memory holds.

        On a CPU they are shared out among the threads; on a GPU they are one batch where they fit.

        Both Hessians come from the layer as it is, its gate and up weights unquantised: the draft reads the target's
        KV and must choose the target's experts (docs/quantize.md compares the choices).

        Args:
            layer_id: true layer number.
            experts: canonical weights in the stored dtype.
            math: the family's activation.
            log: the tokens of each expert.
            form: what the layer becomes.
            settings: bits and group size of `form`, and the rest.

        Raises:
            InputError: a weight that is not finite.
        """
        result = LayerResult()
        counts = log.counts
        most = experts_at_once(experts.gate_proj.shape[2], experts.gate_proj.shape[1], working_bytes(self.device))
        workers = 1 if self.device.type != "cpu" else min(torch.get_num_threads(), most)
        width = min(most // workers, -(-len(counts) // workers))
        batches = [range(first, min(first + width, len(counts))) for first in range(0, len(counts), width)]

        def work(chosen: range) -> LayerResult:
            return self._quantize_some(layer_id, experts, math, log, counts, chosen, form, settings)

        for part in spread(work, batches, workers):
            result.tensors |= part.tensors
            result.linears += part.linears
        order = {projection: place for place, projection in enumerate(PROJECTIONS)}
        result.linears.sort(key=lambda linear: (linear.expert, order[linear.projection]))
        return result

    def _quantize_some(
        self,
        layer_id: int,
        experts: LayerExperts,
        math: ExpertMath,
        log: TokenLog,
        counts: list[int],
        chosen: range,
        form: LayerFormat,
        settings: SolverSettings,
    ) -> LayerResult:
        result = LayerResult()
        part = slice(chosen.start, chosen.stop)
        tokens = counts[part]
        gate_up = torch.cat([experts.gate_proj[part], experts.up_proj[part]], 1).to(self.device, torch.float32)
        down = experts.down_proj[part].to(self.device, torch.float32)
        for place, expert_id in enumerate(chosen):
            _check_finite(gate_up[place], down[place], layer_id, expert_id)
        hidden_hessians = torch.empty(len(chosen), gate_up.shape[2], gate_up.shape[2], device=self.device)
        inner_hessians = torch.empty(len(chosen), down.shape[2], down.shape[2], device=self.device)
        for place, expert_id in enumerate(chosen):
            inputs = log.inputs(expert_id).to(self.device, torch.float32)
            hidden_hessians[place] = hessian(inputs)
            gate_up_bias = _gate_up_bias(experts, expert_id, self.device)
            inner_hessians[place] = hessian(math.intermediate(inputs, gate_up[place], gate_up_bias))
        inner = experts.gate_proj.shape[1]
        shared = self._solve(gate_up, hidden_hessians, tokens, settings, "gate_proj" in form.kept)
        own = self._solve(down, inner_hessians, tokens, settings, "down_proj" in form.kept)
        for projection, weights, hessians, solution, rows in (
            ("gate_proj", gate_up[:, :inner], hidden_hessians, shared, slice(0, inner)),
            ("up_proj", gate_up[:, inner:], hidden_hessians, shared, slice(inner, 2 * inner)),
            ("down_proj", down, inner_hessians, own, slice(None)),
        ):
            source: Tensor = getattr(experts, projection)
            bias: Tensor | None = getattr(experts, BIASES[projection])
            if solution is None:
                _keep(result, layer_id, projection, chosen, source, tokens)
            else:
                _store(result, layer_id, projection, chosen, weights, hessians, solution, rows, tokens, settings)
            if bias is not None:
                for expert_id in chosen:
                    result.tensors[f"{linear_name(layer_id, expert_id, projection)}.bias"] = (
                        bias[expert_id].cpu().clone()
                    )
        return result

    def _solve(
        self, weights: Tensor, hessians: Tensor, tokens: list[int], settings: SolverSettings, kept: bool
    ) -> Solution | None:
        if kept:
            return None
        if self.solver is None:
            return round_solution(weights, settings)
        return self.solver.solve(weights, hessians, tokens, settings)


def working_bytes(device: torch.device) -> int:
    """The working memory: a fixed size, or a quarter of a GPU's memory where that is more."""
    if device.type == "cpu":
        return WORKING_BYTES
    return max(WORKING_BYTES, torch.cuda.get_device_properties(device).total_memory // 4)


def experts_at_once(hidden_size: int, moe_intermediate_size: int, working_bytes: int = WORKING_BYTES) -> int:
    """How many experts' Hessians and float32 copies the working memory holds: about 5 of the one, 8 of the other."""
    squares = hidden_size**2 + moe_intermediate_size**2
    return max(1, working_bytes // (4 * (5 * squares + 8 * 2 * hidden_size * moe_intermediate_size)))


def _gate_up_bias(experts: LayerExperts, expert_id: int, device: torch.device) -> Tensor | None:
    if experts.gate_bias is None or experts.up_bias is None:
        return None
    return torch.cat([experts.gate_bias[expert_id], experts.up_bias[expert_id]]).to(device, torch.float32)


def _check_finite(gate_up: Tensor, down: Tensor, layer_id: int, expert_id: int) -> None:
    for name, weights in (("gate_proj or up_proj", gate_up), ("down_proj", down)):
        bad = int((~torch.isfinite(weights)).sum())
        if bad:
            raise InputError(
                expected=f"finite weights in {name} of layer {layer_id}, expert {expert_id}",
                found=f"{bad} that are infinite or not a number",
                mend="download or copy the model again",
            )


def _keep(
    result: LayerResult, layer_id: int, projection: str, chosen: range, source: Tensor, tokens: list[int]
) -> None:
    for expert_id, count in zip(chosen, tokens, strict=True):
        name = f"{linear_name(layer_id, expert_id, projection)}.weight"
        result.tensors[name] = source[expert_id].to("cpu", copy=True)
        result.linears.append(
            LinearReport(layer_id, expert_id, projection, count, "kept", 0, 0, 0.0, 0.0, 0.0 if count else None)
        )


def _store(
    result: LayerResult,
    layer_id: int,
    projection: str,
    chosen: range,
    weights: Tensor,
    hessians: Tensor,
    solution: Solution,
    rows: slice,
    tokens: list[int],
    settings: SolverSettings,
) -> None:
    codes, scales, zeros = (tensor[:, rows] for tensor in (solution.codes, solution.scales, solution.zeros))
    size = effective_group_size(codes.shape[-1], settings.group_size, bits=settings.bits)
    quantized = dequantize(codes, scales, zeros, size, torch.float32)
    weight_errors, output_errors = relative_errors(weights, quantized, hessians)
    for place, (expert_id, count) in enumerate(zip(chosen, tokens, strict=True)):
        name = linear_name(layer_id, expert_id, projection)
        packed = pack_linear(codes[place], scales[place], zeros[place], settings.bits, size)
        result.tensors.update({f"{name}.{part}": tensor.cpu() for part, tensor in packed.items()})
        result.linears.append(
            LinearReport(
                layer=layer_id,
                expert=expert_id,
                projection=projection,
                tokens=count,
                method=solution.methods[place],
                bits=settings.bits,
                group_size=size,
                damping=solution.damping[place],
                weight_error=float(weight_errors[place]),
                output_error=float(output_errors[place]) if count else None,
            )
        )
