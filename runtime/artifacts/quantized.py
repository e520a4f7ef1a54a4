"""The quantized artifact: a Hugging Face folder in GPTQ interchange format, and its reader."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.gptq_format import dequantize, effective_group_size, unpack_linear
from runtime.artifacts.manifest import MANIFEST, FileEntry, check_files, is_finished, load_manifest, sha256_file
from runtime.errors import ArtifactError, InputError
from runtime.model.families import PROJECTIONS, LayerExperts

PARTS = ("qweight", "qzeros", "scales", "g_idx")
BIASES = {"gate_proj": "gate_bias", "up_proj": "up_bias", "down_proj": "down_bias"}
MEND = "make the quantized artifact again with `moespeq quantize --force`"
_EXPERT_TENSOR = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.")


def linear_name(layer_id: int, expert_id: int, projection: str) -> str:
    """The name of a routed expert's linear in the folder, the same for every family."""
    return f"model.layers.{layer_id}.mlp.experts.{expert_id}.{projection}"


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """How the experts of one layer are quantised; a projection that is not named in `kept` has codes."""

    bits: int
    group_size: int  # as asked for; gptq_format.effective_group_size applies to each projection
    kept: tuple[str, ...] = ()  # projections in the source dtype


@dataclass(frozen=True, slots=True)
class Calibration:
    """The text that the Hessians come from."""

    source: str  # "embedded", or the name of the file
    sequences: int
    tokens: int
    seq_len: int
    seed: int
    digest: str  # sha256 of the token ids; "" where no text was used


@dataclass(frozen=True, slots=True)
class QuantizedManifest:
    """What `quantize` promises to `profile`, `pack` and `run`."""

    KIND: ClassVar[str] = "quantized"

    model_digest: str  # of the source checkpoint
    model_type: str
    num_experts: int
    hidden_size: int
    moe_intermediate_size: int
    dtype: str  # of the source's expert weights
    has_bias: bool
    method: str  # gptq | rtn
    solver: str  # batched | auto-gptq
    bits: int
    group_size: int
    damp_percent: float
    scale_search: bool
    layers: dict[str, LayerFormat]  # by true layer number
    calibration: Calibration
    quantized_linears: int
    kept_linears: int
    rounded_linears: int  # of the quantised ones, those rounded to nearest for want of tokens; all with method rtn
    mean_output_error: float  # over the quantised linears; report.json has each
    settings: dict[str, str]  # the choices that make the result what it is
    files: dict[str, FileEntry]


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """One linear as codes; its value is (code - zero) * scale."""

    bits: int
    group_size: int  # input channels a scale, as it is, never -1
    codes: Tensor  # uint8 [out, in]
    scales: Tensor  # float16 [out, groups]
    zeros: Tensor  # uint8 [out, groups]
    bias: Tensor | None = None  # [out], source dtype

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weights, computed in float32 and rounded once."""
        return dequantize(self.codes, self.scales, self.zeros, self.group_size, dtype)


@dataclass(frozen=True, slots=True)
class KeptLinear:
    """One linear in the source dtype."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weights in another dtype."""
        return self.weight.to(dtype)


@dataclass(frozen=True)
class Quantized:
    """A finished quantized folder, checked on opening."""

    folder: Path
    manifest: QuantizedManifest
    checkpoint: Checkpoint

    @classmethod
    def open(cls, folder: str | Path, verify: bool = False) -> Quantized:
        """Open a folder and check that the manifest's files and every expert's tensors are there.

        Args:
            folder: the artifact.
            verify: compare the files' checksums too.

        Raises:
            ArtifactError: unfinished, another version, a file of another size, a tensor missing or one too many.
        """
        place = Path(folder)
        manifest = load_manifest(place, QuantizedManifest)
        check_files(place, manifest.files, "quantized", contents=verify)
        try:
            checkpoint = Checkpoint.open(place)
        except InputError as error:
            raise ArtifactError(expected=error.expected, found=error.found, mend=MEND) from error
        artifact = cls(place, manifest, checkpoint)
        artifact.check_tensors()
        return artifact

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """True numbers of the layers with routed experts."""
        return tuple(sorted(int(layer) for layer in self.manifest.layers))

    def linear(
        self, layer_id: int, expert_id: int, projection: str, device: torch.device | None = None
    ) -> QuantizedLinear | KeptLinear:
        """Read one linear.

        Args:
            layer_id: true layer number.
            expert_id: within the layer.
            projection: gate_proj, up_proj or down_proj.
            device: where its tensors are to be; the CPU where none is named.

        Raises:
            ArtifactError: no such linear, or tensors that are not of the format.
        """
        layer = self.manifest.layers.get(str(layer_id))
        if layer is None or not 0 <= expert_id < self.manifest.num_experts or projection not in PROJECTIONS:
            raise ArtifactError(
                expected=f"a linear of layers {list(self.moe_layers)}, experts 0 to {self.manifest.num_experts - 1}, "
                f"projections {', '.join(PROJECTIONS)} in {self.folder}",
                found=f"layer {layer_id}, expert {expert_id}, {projection} asked for",
                mend=MEND,
            )
        name = linear_name(layer_id, expert_id, projection)
        bias = self.checkpoint.read(f"{name}.bias").to(device) if self.manifest.has_bias else None
        if projection in layer.kept:
            return KeptLinear(self.checkpoint.read(f"{name}.weight").to(device), bias)
        tensors = {part: self.checkpoint.read(f"{name}.{part}").to(device) for part in PARTS}
        codes, scales, zeros = unpack_linear(tensors, layer.bits, layer.group_size, name)
        out_features, in_features = self._shape(projection)
        if tuple(codes.shape) != (out_features, in_features):
            raise ArtifactError(
                expected=f"{name} of shape {(out_features, in_features)}", found=str(tuple(codes.shape)), mend=MEND
            )
        size = effective_group_size(in_features, layer.group_size, name=name, bits=layer.bits)
        return QuantizedLinear(layer.bits, size, codes, scales, zeros, bias)

    def read_layer(self, layer_id: int, dtype: torch.dtype, device: torch.device | None = None) -> LayerExperts:
        """The dequantised experts of a layer, stacked as `families.read_layer` stacks the source's."""
        stacks: dict[str, Tensor] = {}

        def put(name: str, expert_id: int, tensor: Tensor) -> None:
            if name not in stacks:
                stacks[name] = tensor.new_empty(self.manifest.num_experts, *tensor.shape)
            stacks[name][expert_id] = tensor

        for expert_id in range(self.manifest.num_experts):
            for projection in PROJECTIONS:
                linear = self.linear(layer_id, expert_id, projection, device)
                put(projection, expert_id, linear.dequantized(dtype))
                if linear.bias is not None:
                    put(BIASES[projection], expert_id, linear.bias)
        return LayerExperts(**stacks)

    def _shape(self, projection: str) -> tuple[int, int]:
        hidden, inner = self.manifest.hidden_size, self.manifest.moe_intermediate_size
        return (hidden, inner) if projection == "down_proj" else (inner, hidden)

    @property
    def is_ours(self) -> bool:
        """Whether `moespeq quantize` made it."""
        return is_finished(self.folder)

    @property
    def sha256(self) -> str:
        """What names it: the digest of its manifest, which holds those of its files; of other programs' the model's."""
        return sha256_file(self.folder / MANIFEST) if self.is_ours else self.checkpoint.digest

    def check_tensors(self) -> None:
        """Refuse a folder with an expert's tensor missing, or one too many.

        Raises:
            ArtifactError: naming them.
        """
        expected = {
            f"{linear_name(layer_id, expert_id, projection)}.{part}"
            for layer_id in self.moe_layers
            for expert_id in range(self.manifest.num_experts)
            for projection in PROJECTIONS
            for part in self._parts(layer_id, projection)
        }
        found = {name for name in self.checkpoint.tensors if _EXPERT_TENSOR.search(name)}
        for what, names in (("missing", expected - found), ("unexpected", found - expected)):
            if names:
                raise ArtifactError(
                    expected=f"{len(expected)} tensors of routed experts in {self.folder}, as its manifest says",
                    found=f"{len(names)} {what}: {', '.join(sorted(names)[:3])}{' ...' if len(names) > 3 else ''}",
                    mend=MEND,
                )

    def _parts(self, layer_id: int, projection: str) -> tuple[str, ...]:
        parts = ("weight",) if projection in self.manifest.layers[str(layer_id)].kept else PARTS
        return (*parts, "bias") if self.manifest.has_bias else parts
