"""What was done to each linear, and the totals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.quantize.plan import QuantizeOptions, layer_bytes, plain_format, source_item_bytes
from moespeq_cli.quantize.sensitive import SensitiveChoice
from runtime.artifacts.quantized import LayerFormat
from runtime.memory.sizes import format_size
from runtime.model.families import MoeSpec

BLOCK = 256  # input channels whose products are taken at once


@dataclass(frozen=True, slots=True)
class LinearReport:
    """One linear: what it saw, how it was quantised, how far off it is."""

    layer: int
    expert: int
    projection: str
    tokens: int  # calibration tokens that the router sent to its expert
    method: str  # gptq | rtn | kept
    bits: int  # 0 where kept
    group_size: int  # channels a scale; 0 where kept
    damping: float  # share of the Hessian's mean diagonal that was added; 0 where none was used
    weight_error: float  # |W - Wq| / |W|, Frobenius
    output_error: float | None  # |X (W - Wq)^T| / |X W^T| over the calibration inputs X; None where there were none


def relative_errors(weights: Tensor, quantized: Tensor, hessians: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and output errors of a batch of linears.

    Args:
        weights, quantized: float32 [E, out, in].
        hessians: float32 [E, in, in], second moments of the inputs; |X D^T|^2 is tr(D H D^T) up to the same factor
            above and below the line.

    Returns:
        [E] and [E]; 0 for linears that are all zeros.
    """
    error = weights - quantized
    weight_error = _ratio((error * error).sum((1, 2)), (weights * weights).sum((1, 2)))
    return weight_error, _ratio(_weighed(error, hessians), _weighed(weights, hessians))


def _weighed(rows: Tensor, hessians: Tensor) -> Tensor:
    """tr(D H D^T) of each linear, [E]; half of the products, as H is symmetric."""
    total = torch.zeros(len(rows), device=rows.device)
    for start in range(0, rows.shape[-1], BLOCK):
        here = rows[..., start : start + BLOCK]
        products = torch.bmm(here, hessians[:, start : start + BLOCK, start : start + BLOCK])
        if start:
            products.baddbmm_(rows[..., :start], hessians[:, :start, start : start + BLOCK], alpha=2.0)
        total += products.mul_(here).sum((1, 2))
    return total


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 0, above.clamp_min(0) / below.clamp_min(torch.finfo(torch.float32).tiny), 0.0).sqrt()


def mean_output_error(linears: Iterable[LinearReport]) -> float:
    """Mean over the quantised linears that saw text; 0 where none did."""
    errors = [linear.output_error for linear in linears if linear.output_error is not None and linear.method != "kept"]
    return sum(errors) / len(errors) if errors else 0.0


def build_report(linears: list[LinearReport], min_tokens: int, settings: dict[str, str]) -> dict[str, Any]:
    """The body of report.json: totals, one row a layer, the experts that saw too little, one row a linear."""
    layers = sorted({linear.layer for linear in linears})
    starved = sorted({(x.layer, x.expert, x.tokens) for x in linears if x.tokens < min_tokens and x.method != "kept"})
    return {
        "settings": settings,
        "totals": _totals(linears),
        "layers": [{"layer": n, **_totals([x for x in linears if x.layer == n])} for n in layers],
        "experts_with_too_few_tokens": [{"layer": n, "expert": e, "tokens": t} for n, e, t in starved],
        "linears": [asdict(linear) for linear in linears],
    }


def sensitive_report(
    spec: MoeSpec,
    options: QuantizeOptions,
    formats: dict[int, LayerFormat],
    linears: list[LinearReport],
    plain: list[LinearReport],
    acceptance: dict[str, Any],
    choice: SensitiveChoice | None,
) -> dict[str, Any]:
    """What the sensitive layers bought, beside the same layers in the format of all others.

    Args:
        spec, options, formats: the work.
        linears: as they were quantised.
        plain: those of the sensitive layers in the other format.
        acceptance: what `Comparison.acceptance` found.
        choice: how a profile picked the layers; None where they were named.
    """
    item_bytes = source_item_bytes(spec)
    layers = []
    for layer_id in sorted(options.sensitive_layers):
        form = formats[layer_id]
        without = plain_format(form, options)
        layers.append(
            {
                "layer": layer_id,
                "output_error": mean_output_error(x for x in linears if x.layer == layer_id),
                "output_error_plain": mean_output_error(x for x in plain if x.layer == layer_id),
                "bytes": layer_bytes(spec, form, item_bytes),
                "bytes_plain": layer_bytes(spec, without, item_bytes),
            }
        )
    others = [form for layer_id, form in formats.items() if layer_id not in options.sensitive_layers]
    rest = sum(layer_bytes(spec, form, item_bytes) for form in others)
    return {
        "bits": options.sensitive_bits,
        "layers": layers,
        "bytes": rest + sum(row["bytes"] for row in layers),
        "bytes_plain": rest + sum(row["bytes_plain"] for row in layers),
        "acceptance": acceptance,
        "chosen_by": None if choice is None else asdict(choice),
    }


def sensitive_lines(report: dict[str, Any]) -> list[str]:
    """The same for a person."""
    lines = []
    for row in report["layers"]:
        lines.append(
            f"sensitive layer {row['layer']}: output error {row['output_error_plain']:.4f} -> "
            f"{row['output_error']:.4f}, {format_size(row['bytes_plain'])} -> {format_size(row['bytes'])}"
        )
    found = report["acceptance"]
    shares = ", ".join(
        f"{words} {100 * found['plain'][key]:.2f} % -> {100 * found['chosen'][key]:.2f} %"
        for key, words in (("overlap", "sampled acceptance"), ("greedy", "greedy agreement"))
    )
    lines.append(
        f"bought on {found['tokens']} calibration tokens: {shares}; experts of the draft "
        f"{format_size(report['bytes_plain'])} -> {format_size(report['bytes'])}"
    )
    return lines


def _totals(linears: list[LinearReport]) -> dict[str, Any]:
    methods = [linear.method for linear in linears]
    worst = max((x for x in linears if x.output_error is not None), key=lambda x: x.output_error or 0.0, default=None)
    return {
        "linears": len(linears),
        "quantized": len(linears) - methods.count("kept"),
        "gptq": methods.count("gptq"),
        "rtn": methods.count("rtn"),
        "kept": methods.count("kept"),
        "mean_weight_error": sum(x.weight_error for x in linears) / len(linears) if linears else 0.0,
        "mean_output_error": mean_output_error(linears),
        "max_output_error": None if worst is None else worst.output_error,
        "max_damping": max((x.damping for x in linears), default=0.0),
        "tokens_least": min((x.tokens for x in linears), default=0),
        "tokens_most": max((x.tokens for x in linears), default=0),
    }
