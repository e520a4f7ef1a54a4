"""GPTQ checkpoints of other programs as drafts: what their tensors say, checked against the model they are of."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.gptq_format import SUPPORTED_BITS, WORD_BITS, effective_group_size, symmetric_zero
from runtime.artifacts.manifest import PROGRESS, is_finished, require_same_model
from runtime.artifacts.quantized import (
    PARTS,
    Calibration,
    KeptLinear,
    LayerFormat,
    Quantized,
    QuantizedLinear,
    QuantizedManifest,
    linear_name,
)
from runtime.errors import ArtifactError, InputError, MoespeqError
from runtime.model.families import PROJECTIONS, MoeSpec, read_expert

MOST_ERROR = 0.8  # of a linear's norm; INT4 has about 0.1, and codes of other weights about 1.4
FORMAT = "docs/format_quantized.md lists what is accepted"


def open_quantized(folder: Path, checkpoint: Checkpoint, spec: MoeSpec) -> Quantized:
    """A quantized artifact of a model: one that `moespeq quantize` made, or a GPTQ checkpoint of another program.

    Args:
        folder: the artifact, or a Hugging Face folder with a GPTQ `quantization_config`.
        checkpoint: the model that it has to be of.
        spec: what that model is.

    Raises:
        ArtifactError: unfinished, damaged, or in a form of GPTQ that is not supported; the message names the tensor.
        InputError: of another model.
    """
    ours = is_finished(folder) or (folder / PROGRESS).is_file() or not (folder / "config.json").is_file()
    foreign = None if ours else Checkpoint.open(folder)
    if foreign is None or _is_by_moespeq(foreign):  # and then without its manifest it is not finished
        source = Quantized.open(folder, verify=True)
        require_same_model("quantized", folder, source.manifest.model_digest, checkpoint.digest)
        return source
    return _imported(foreign, checkpoint, spec)


def _is_by_moespeq(foreign: Checkpoint) -> bool:
    settings = foreign.config.get("quantization_config")
    meta = settings.get("meta") if isinstance(settings, dict) else None
    return isinstance(meta, dict) and meta.get("quantizer") == ["moespeq"]


def _imported(foreign: Checkpoint, checkpoint: Checkpoint, spec: MoeSpec) -> Quantized:
    settings = foreign.config.get("quantization_config")
    settings = settings if isinstance(settings, dict) else {}
    known = {"quant_method": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32"}
    for name, wanted in known.items():
        found = settings.get(name, wanted if settings and name != "quant_method" else None)
        if found != wanted:
            raise ArtifactError(
                expected=f"{name} {wanted!r} in the quantization_config of {foreign.folder / 'config.json'}",
                found=repr(found),
                mend=f"pass a folder that `moespeq quantize` or GPTQModel made; {FORMAT}",
            )
    formats = {layer_id: _layer_format(foreign, spec, layer_id) for layer_id in spec.moe_layers}
    kind = _Halves if spec.disk_layout.kind == "interleaved" else Quantized
    quantized = kind(foreign.folder, _manifest(foreign, checkpoint, spec, settings, formats), foreign)
    quantized.check_tensors()
    for layer_id in spec.moe_layers:
        _check_layer(quantized, checkpoint, spec, layer_id)
    return quantized


class _Halves(Quantized):
    """Experts whose gate and up rows alternate in the model, and which GPTQModel cuts in two as they are.

    Its `gate_proj` is the first half of these rows and its `up_proj` the second; rows are quantised one by one, so that
    putting them in order again changes none.
    """

    def linear(
        self, layer_id: int, expert_id: int, projection: str, device: torch.device | None = None
    ) -> QuantizedLinear | KeptLinear:
        """Read one linear, in the order of the model's own."""
        if projection not in ("gate_proj", "up_proj"):
            return super().linear(layer_id, expert_id, projection, device)
        both = ("gate_proj", "up_proj")
        halves = [super(_Halves, self).linear(layer_id, expert_id, half, device) for half in both]
        first = 0 if projection == "gate_proj" else 1
        rows: dict[str, Any] = {
            field.name: torch.cat([getattr(half, field.name) for half in halves])[first::2].contiguous()
            for field in fields(halves[0])
            if isinstance(getattr(halves[0], field.name), torch.Tensor)
        }
        return replace(halves[0], **rows)


def _layer_format(foreign: Checkpoint, spec: MoeSpec, layer_id: int) -> LayerFormat:
    """The one format of a layer's experts, read off the shapes: rules by module name need no interpreting then."""
    found = {
        projection: _linear_format(foreign, spec, linear_name(layer_id, 0, projection)) for projection in PROJECTIONS
    }
    kept = tuple(projection for projection, form in found.items() if form is None)
    coded = {projection: form for projection, form in found.items() if form is not None}
    if not coded:
        raise ArtifactError(
            expected=f"quantised experts in layer {layer_id} of {foreign.folder}",
            found="none",
            mend="make it with `moespeq quantize`, which knows this family",
        )
    bits = {form[0] for form in coded.values()}
    asked = max(form[1] for form in coded.values())
    sizes = {p: effective_group_size(_in_features(spec, p), asked, name=linear_name(layer_id, 0, p)) for p in coded}
    if len(bits) != 1 or any(sizes[projection] != form[1] for projection, form in coded.items()):
        told = ", ".join(f"{p} {form[0]} bits in groups of {form[1]}" for p, form in coded.items())
        raise ArtifactError(
            expected=f"one width and group size for all experts of layer {layer_id} in {foreign.folder}",
            found=told,
            mend="quantise again without rules that tell projections of a layer apart",
        )
    return LayerFormat(bits.pop(), asked, kept)


def _in_features(spec: MoeSpec, projection: str) -> int:
    return spec.moe_intermediate_size if projection == "down_proj" else spec.hidden_size


def _linear_format(foreign: Checkpoint, spec: MoeSpec, name: str) -> tuple[int, int] | None:
    """Bits and group size of a linear with codes; None where it has a plain weight."""
    if f"{name}.weight" in foreign.tensors:
        return None
    parts = {part: foreign.tensors.get(f"{name}.{part}") for part in PARTS}
    absent = [part for part, info in parts.items() if info is None]
    if absent:
        raise ArtifactError(
            expected=f"{name}.{absent[0]} in {foreign.folder}",
            found="none of that name",
            mend=f"pass a checkpoint whose routed experts are quantised one by one; {FORMAT}",
        )
    in_features = _in_features(spec, name.rpartition(".")[2])
    rows, groups = (parts[part].shape[0] if parts[part].shape else 0 for part in ("qweight", "scales"))  # type: ignore[union-attr]
    bits = rows * WORD_BITS / in_features
    if bits not in SUPPORTED_BITS or not groups or in_features % groups:
        raise ArtifactError(
            expected=f"{name} with 4 or 8 bits and groups that divide its {in_features} input features",
            found=f"{bits:g} bits and {groups} groups",
            mend=f"quantise again with such; {FORMAT}",
        )
    return int(bits), in_features // groups


def _manifest(
    foreign: Checkpoint,
    checkpoint: Checkpoint,
    spec: MoeSpec,
    settings: dict[str, object],
    formats: dict[int, LayerFormat],
) -> QuantizedManifest:
    first = formats[spec.moe_layers[0]]
    kept = spec.num_experts * sum(len(form.kept) for form in formats.values())
    return QuantizedManifest(
        model_digest=checkpoint.digest,
        model_type=spec.model_type,
        num_experts=spec.num_experts,
        hidden_size=spec.hidden_size,
        moe_intermediate_size=spec.moe_intermediate_size,
        dtype=spec.dtype,
        has_bias=spec.has_bias,
        method="gptq",
        solver="another program's",
        bits=first.bits,
        group_size=first.group_size,
        damp_percent=0.0,
        scale_search=False,
        layers={str(layer_id): form for layer_id, form in formats.items()},
        calibration=Calibration("unknown", 0, 0, 0, 0, ""),
        quantized_linears=spec.num_records * len(PROJECTIONS) - kept,
        kept_linears=kept,
        rounded_linears=0,
        mean_output_error=0.0,
        settings={"quantization_config": str(settings.get("meta", ""))},
        files={},
    )


def _check_layer(quantized: Quantized, checkpoint: Checkpoint, spec: MoeSpec, layer_id: int) -> None:
    """Every linear of a layer reads as one of the format; those of one expert are those of the model, roughly."""
    weights = read_expert(checkpoint, spec, layer_id, 0)
    for expert_id in range(spec.num_experts):
        for projection in PROJECTIONS:
            name = linear_name(layer_id, expert_id, projection)
            try:
                linear = quantized.linear(layer_id, expert_id, projection)
            except MoespeqError as error:
                raise ArtifactError(
                    expected=error.expected, found=error.found, mend=f"quantise it in another way; {FORMAT}"
                ) from error
            if isinstance(linear, QuantizedLinear) and bool((linear.zeros != symmetric_zero(linear.bits)).any()):
                raise ArtifactError(
                    expected=f"symmetric codes in {name}",
                    found=f"zeros from {int(linear.zeros.min())} to {int(linear.zeros.max())}",
                    mend=f"quantise with sym=True; {FORMAT}",
                )
            if expert_id == 0:
                source = getattr(weights, projection).float()
                error_share = float(
                    (linear.dequantized(torch.float32) - source).norm() / source.norm().clamp_min(1e-30)
                )
                if not error_share < MOST_ERROR:
                    raise InputError(
                        expected=f"{name} of {quantized.folder} near that of the model {checkpoint.folder}",
                        found=f"a difference of {error_share:.2f} of its norm",
                        mend="pass the model that it was made from with --model",
                    )
