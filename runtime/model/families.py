"""Where each model family keeps its routed experts on disk, and what else has to be known about it.

In memory every supported family holds the library's fused experts; on disk three layouts are met:

* `separate`: one tensor a projection and expert, `{prefix}.{expert}.{name}.weight`, [out, in];
* `fused`: one tensor a layer, gate and up rows concatenated, `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I];
* `interleaved`: one tensor a layer, transposed, gate and up columns alternating, with biases: `gate_up_proj`
  [E, H, 2I], `gate_up_proj_bias` [E, 2I], `down_proj` [E, I, H], `down_proj_bias` [E, H].
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from runtime.artifacts.checkpoint import Checkpoint
from runtime.errors import InputError

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class DiskLayout:
    """One way of naming and shaping routed experts on disk; `{L}` is the layer."""

    kind: str  # separate | fused | interleaved
    prefix: str
    gate: str
    up: str
    down: str


LAYOUTS = (
    DiskLayout("separate", "model.layers.{L}.mlp.experts", "gate_proj", "up_proj", "down_proj"),
    DiskLayout("separate", "model.layers.{L}.block_sparse_moe.experts", "w1", "w3", "w2"),
    DiskLayout("separate", "model.layers.{L}.mlp.experts", "w1", "w3", "w2"),
    DiskLayout("fused", "model.layers.{L}.mlp.experts", "gate_up_proj", "gate_up_proj", "down_proj"),
    DiskLayout("fused", "model.layers.{L}.block_sparse_moe.experts", "gate_up_proj", "gate_up_proj", "down_proj"),
    DiskLayout(
        "fused",
        "model.layers.{L}.block_sparse_moe",
        "input_linear.weight",
        "input_linear.weight",
        "output_linear.weight",
    ),
)
INTERLEAVED = DiskLayout("interleaved", "model.layers.{L}.mlp.experts", "gate_up_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between model families; a family that is not listed uses the defaults."""

    interleaved: bool = False  # experts fused on disk, transposed, gate and up alternating, with biases
    renames: tuple[tuple[str, str], ...] = ()  # patterns of names on disk and what they are in memory
    expert_size_keys: tuple[str, ...] = ("moe_intermediate_size", "intermediate_size")
    routers: tuple[str, ...] = (
        "mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.router.weight", "mlp.gate.wg.weight",
    )  # fmt: skip


_BLOCK_SPARSE = (r"\.block_sparse_moe\.", ".mlp.")
_GRANITE = Family(
    renames=((r"\.block_sparse_moe\.router\.layer\.weight$", ".block_sparse_moe.router.weight"),),
    expert_size_keys=("intermediate_size",),
)
FAMILIES: dict[str, Family] = {
    "mixtral": Family(renames=(_BLOCK_SPARSE,), expert_size_keys=("intermediate_size",)),
    "minimax_m2": Family(renames=(_BLOCK_SPARSE,), expert_size_keys=("intermediate_size",)),
    "phimoe": Family(
        renames=(_BLOCK_SPARSE, (r"\.mlp\.gate\.weight$", ".mlp.router.weight")),
        expert_size_keys=("intermediate_size",),
    ),
    "olmoe": Family(expert_size_keys=("intermediate_size",)),
    "gpt_oss": Family(interleaved=True, expert_size_keys=("intermediate_size",)),
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "ernie4_5_moe": Family(renames=((r"\.mlp\.moe_statics\.", ".mlp.gate.moe_statics."),)),
    "exaone_moe": Family(renames=((r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),)),
    "afmoe": Family(routers=("mlp.router.gate.weight",)),
}


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """The facts about a model that the stages share; part of the pack's manifest."""

    model_type: str
    num_layers: int
    moe_layers: tuple[int, ...]  # true layer numbers
    num_experts: int  # in one layer
    top_k: int
    hidden_size: int
    moe_intermediate_size: int
    dtype: str  # of the expert weights, as safetensors spells it
    has_bias: bool
    layout: int  # index into LAYOUTS, -1 for the interleaved one

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert of one layer, biases included."""
        weights = 3 * self.hidden_size * self.moe_intermediate_size
        return weights + (2 * self.moe_intermediate_size + self.hidden_size if self.has_bias else 0)

    @property
    def num_records(self) -> int:
        """Routed experts in the whole model."""
        return len(self.moe_layers) * self.num_experts

    @property
    def family(self) -> Family:
        """The row of the family table."""
        return FAMILIES.get(self.model_type, Family())

    @property
    def disk_layout(self) -> DiskLayout:
        """How the source names its experts."""
        return INTERLEAVED if self.layout < 0 else LAYOUTS[self.layout]

    def expert_keys(self) -> list[tuple[int, int]]:
        """Every (layer_id, expert_id), layer by layer."""
        return [(layer, expert) for layer in self.moe_layers for expert in range(self.num_experts)]


@dataclass(slots=True)
class ExpertWeights:
    """One expert: gate_proj and up_proj [I, H], down_proj [H, I]; biases [I], [I], [H] where the family has them."""

    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """The tensors that are there, by field name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(slots=True)
class LayerExperts(ExpertWeights):
    """All experts of a layer, stacked: the fields of `ExpertWeights` with a leading [E]."""

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> LayerExperts:
        """The same weights on a device, and in a type; these themselves where they are so already."""
        moved = {name: tensor.to(device, dtype) for name, tensor in self.named().items()}
        return self if all(moved[name] is tensor for name, tensor in self.named().items()) else LayerExperts(**moved)

    def expert(self, expert_id: int) -> ExpertWeights:
        """One expert, as views."""
        return ExpertWeights(**{name: tensor[expert_id] for name, tensor in self.named().items()})


def describe(checkpoint: Checkpoint) -> MoeSpec:
    """Find the routed experts of a model and check that all of them are there.

    Raises:
        InputError: not a Mixture-of-Experts model, no layer with experts, a tensor missing or misshapen, or a layout
            that is not known.
    """
    config = checkpoint.config
    model_type = str(config.get("model_type", ""))
    num_experts = _first(config, ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"))
    top_k = _first(config, ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k"))
    if not num_experts or not top_k:
        raise InputError(
            expected="a Mixture-of-Experts model (num_experts and num_experts_per_tok in its config.json)",
            found=f"model_type {model_type!r} without routed experts in {checkpoint.folder}",
            mend="pass a Mixture-of-Experts model, such as Qwen1.5-MoE, Mixtral or OLMoE",
        )
    _check_attention(config, model_type)
    num_layers, hidden_size = (_whole(config, name, checkpoint) for name in ("num_hidden_layers", "hidden_size"))
    family = FAMILIES.get(model_type, Family())
    index, layers = _find_layout(checkpoint, family)
    layers = [layer for layer in layers if layer < num_layers]  # next-token-prediction layers beyond the model stay out
    if not layers:
        named = next((name for name in checkpoint.tensors if ".experts." in name), None)
        raise InputError(
            expected=f"routed experts in at least one of the {num_layers} layers of {checkpoint.folder}",
            found=f"none: every layer of this {model_type} is dense"
            if named is None
            else f"none under a name that is known; this {model_type} has {named}",
            mend="run it with transformers; docs/models.md lists the families, and how one is added",
        )
    layout = INTERLEAVED if index < 0 else LAYOUTS[index]
    _check_counts(checkpoint, num_layers, num_experts, top_k)
    has_bias = layout.kind == "interleaved"
    size = _first(config, family.expert_size_keys)
    probe = MoeSpec(model_type, num_layers, tuple(layers), num_experts, top_k, hidden_size, size, "", has_bias, index)
    dtype = _check_experts(checkpoint, probe)
    _check_routers(checkpoint, probe)
    return MoeSpec(**{f.name: getattr(probe, f.name) for f in fields(MoeSpec)} | {"dtype": dtype})


ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def _check_attention(config: dict[str, Any], model_type: str) -> None:
    """Refuse what config.json says outright to keep other state than keys and values; the library knows of the rest."""
    kinds = config.get("layer_types")
    others = sorted({str(kind) for kind in kinds} - ATTENTION_KINDS) if isinstance(kinds, list) else []
    if others:
        raise state_refusal(model_type, ", ".join(others))


def state_refusal(model_type: str, kinds: str) -> InputError:
    """The refusal of a model whose layers keep more than keys and values."""
    return InputError(
        expected="a model whose layers all have attention over keys and values",
        found=f"{model_type} with {kinds} layers",
        mend="use a model without linear attention (or run this one with transformers): speculation over recurrent "
        "state is not supported",
    )


_NUMBERED = re.compile(r"\.layers\.(\d+)\.")


def _check_counts(checkpoint: Checkpoint, num_layers: int, num_experts: int, top_k: int) -> None:
    """Refuse counts that the tensors belie before anything is made as often as they say."""
    layers = {match[1] for name in checkpoint.tensors if (match := _NUMBERED.search(name))}
    rows = max((info.shape[0] for info in checkpoint.tensors.values() if info.shape), default=0)
    facts = (
        ("num_hidden_layers", num_layers, len(layers), "layers have tensors"),
        (
            "the number of experts",
            num_experts,
            max(rows, len(checkpoint.tensors)),
            "are the most that there is room for",
        ),
        ("the number of experts of a token", top_k, num_experts, "are in a layer"),
    )
    for name, said, most, why in facts:
        if not 1 <= said <= most:
            raise InputError(
                expected=f"{name} from 1 to {most} in the config.json of {checkpoint.folder}, for {most} {why}",
                found=str(said)[:40],
                mend="use the config.json that belongs to these weights",
            )


def _whole(config: dict[str, Any], name: str, checkpoint: Checkpoint) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(
            expected=f"{name} above 0 in the config.json of {checkpoint.folder}",
            found=f"{value!r:.60}",
            mend="pass a language model of one stack of decoder layers",
        )
    return value


def _first(config: dict[str, Any], names: tuple[str, ...]) -> int:
    found = (config.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), 0)


def _find_layout(checkpoint: Checkpoint, family: Family) -> tuple[int, list[int]]:
    candidates = [(-1, INTERLEAVED)] if family.interleaved else list(enumerate(LAYOUTS))
    for index, layout in candidates:
        prefix = re.escape(layout.prefix).replace(r"\{L\}", r"(\d+)")
        inner = r"\.\d+" if layout.kind == "separate" else ""
        names = "|".join(re.escape(name) for name in {layout.gate, layout.up, layout.down})
        end = r"\.weight$" if layout.kind == "separate" else "$"
        pattern = re.compile(f"^{prefix}{inner}\\.({names}){end}")
        layers = {int(match[1]) for name in checkpoint.tensors if (match := pattern.match(name))}
        if layers:
            return index, sorted(layers)
    return 0, []


def expert_tensor_names(spec: MoeSpec, layer_id: int) -> dict[str, tuple[int, ...]]:
    """The routed-expert tensors of a layer on disk and the shapes they must have."""
    layout, hidden, inner, experts = spec.disk_layout, spec.hidden_size, spec.moe_intermediate_size, spec.num_experts
    prefix = layout.prefix.format(L=layer_id)
    if layout.kind == "separate":
        rows = {layout.gate: (inner, hidden), layout.up: (inner, hidden), layout.down: (hidden, inner)}
        return {f"{prefix}.{e}.{name}.weight": shape for e in range(experts) for name, shape in rows.items()}
    if layout.kind == "fused":
        return {
            f"{prefix}.{layout.gate}": (experts, 2 * inner, hidden),
            f"{prefix}.{layout.down}": (experts, hidden, inner),
        }
    return {
        f"{prefix}.{layout.gate}": (experts, hidden, 2 * inner),
        f"{prefix}.{layout.gate}_bias": (experts, 2 * inner),
        f"{prefix}.{layout.down}": (experts, inner, hidden),
        f"{prefix}.{layout.down}_bias": (experts, hidden),
    }


def _check_experts(checkpoint: Checkpoint, spec: MoeSpec) -> str:
    dtypes: dict[str, str] = {}
    for layer in spec.moe_layers:
        shapes = expert_tensor_names(spec, layer)
        missing = [name for name in shapes if name not in checkpoint.tensors]
        if missing:
            raise InputError(
                expected=f"{len(shapes)} expert tensors in layer {layer} of {checkpoint.folder}",
                found=f"{len(missing)} of them missing: {', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}",
                mend="download or copy the model again",
            )
        for name, shape in shapes.items():
            info = checkpoint.tensors[name]
            if info.shape != shape:
                raise InputError(
                    expected=f"{name} of shape {list(shape)}, as config.json says",
                    found=str(list(info.shape)),
                    mend="use the config.json that belongs to these weights",
                )
            dtypes[info.dtype] = name
    if len(dtypes) != 1 or next(iter(dtypes)) not in ("BF16", "F16", "F32"):
        raise InputError(
            expected="expert weights of one type: BF16, F16 or F32",
            found=", ".join(f"{dtype} ({name})" for dtype, name in dtypes.items()),
            mend="pass the unquantised model",
        )
    return next(iter(dtypes))


def _check_routers(checkpoint: Checkpoint, spec: MoeSpec) -> None:
    """Every layer with experts has a router, and every layer with a router has experts."""
    present = {memory_name(spec, name) for name in checkpoint.tensors}
    for layer in range(spec.num_layers):
        options = [f"model.layers.{layer}.{router}" for router in spec.family.routers]
        routers = [option for option in options if option in present]
        if layer in spec.moe_layers and not routers:
            raise InputError(
                expected=f"the router of layer {layer} ({' or '.join(options)}) in {checkpoint.folder}",
                found="no tensor of those names",
                mend="download or copy the model again"
                if spec.model_type in FAMILIES
                else f"download or copy the model again; or, where {spec.model_type or 'this family'} calls its router "
                "otherwise, run it with transformers, or add it as docs/models.md shows",
            )
        if layer not in spec.moe_layers and routers:
            raise InputError(
                expected=f"the experts that {routers[0]} routes to, in {checkpoint.folder}",
                found=f"no expert tensor of layer {layer}",
                mend="download or copy the model again",
            )


def memory_name(spec: MoeSpec, name: str) -> str:
    """The name that a tensor outside the routed experts has in the library's model."""
    for pattern, replacement in spec.family.renames:
        name = re.sub(pattern, replacement, name)
    return name


def dense_names(checkpoint: Checkpoint, spec: MoeSpec) -> list[str]:
    """Every tensor on disk that is not a routed expert's, in disk order of names."""
    experts = {name for layer in spec.moe_layers for name in expert_tensor_names(spec, layer)}
    return [name for name in checkpoint.tensors if name not in experts]


def read_expert(checkpoint: Checkpoint, spec: MoeSpec, layer_id: int, expert_id: int) -> ExpertWeights:
    """One expert in canonical form, bit for bit, in the stored type."""
    layout = spec.disk_layout
    prefix = layout.prefix.format(L=layer_id)
    if layout.kind == "separate":
        parts = [checkpoint.read(f"{prefix}.{expert_id}.{n}.weight") for n in (layout.gate, layout.up, layout.down)]
        return ExpertWeights(*parts)
    gate_up = checkpoint.read_row(f"{prefix}.{layout.gate}", expert_id)
    down = checkpoint.read_row(f"{prefix}.{layout.down}", expert_id)
    if layout.kind == "fused":
        gate, up = gate_up.chunk(2, dim=0)
        return ExpertWeights(gate.contiguous(), up.contiguous(), down)
    gate_up_bias = checkpoint.read_row(f"{prefix}.{layout.gate}_bias", expert_id)
    down_bias = checkpoint.read_row(f"{prefix}.{layout.down}_bias", expert_id)
    return ExpertWeights(
        gate_up[:, 0::2].T.contiguous(),
        gate_up[:, 1::2].T.contiguous(),
        down.T.contiguous(),
        gate_up_bias[0::2].contiguous(),
        gate_up_bias[1::2].contiguous(),
        down_bias,
    )


def read_layer(checkpoint: Checkpoint, spec: MoeSpec, layer_id: int) -> LayerExperts:
    """All experts of a layer in canonical form, stacked along a leading [E]; one at a time is in memory twice."""
    stacks: dict[str, Tensor] = {}
    for expert_id in range(spec.num_experts):
        for name, tensor in read_expert(checkpoint, spec, layer_id, expert_id).named().items():
            if name not in stacks:
                stacks[name] = tensor.new_empty(spec.num_experts, *tensor.shape)
            stacks[name][expert_id] = tensor
    return LayerExperts(**stacks)


def to_disk_tensors(spec: MoeSpec, layer_id: int, experts: LayerExperts) -> dict[str, Tensor]:
    """The inverse of `read_layer`: the source's own names and layouts."""
    layout = spec.disk_layout
    prefix = layout.prefix.format(L=layer_id)
    if layout.kind == "separate":
        parts = ((layout.gate, experts.gate_proj), (layout.up, experts.up_proj), (layout.down, experts.down_proj))
        return {f"{prefix}.{e}.{n}.weight": t[e] for e in range(spec.num_experts) for n, t in parts}
    if layout.kind == "fused":
        gate_up = torch.cat([experts.gate_proj, experts.up_proj], dim=1)
        return {f"{prefix}.{layout.gate}": gate_up, f"{prefix}.{layout.down}": experts.down_proj}
    assert experts.gate_bias is not None and experts.up_bias is not None and experts.down_bias is not None
    gate_up = torch.stack([experts.gate_proj, experts.up_proj], dim=2).flatten(1, 2).transpose(1, 2).contiguous()
    return {
        f"{prefix}.{layout.gate}": gate_up,
        f"{prefix}.{layout.gate}_bias": torch.stack([experts.gate_bias, experts.up_bias], dim=2).flatten(1, 2),
        f"{prefix}.{layout.down}": experts.down_proj.transpose(1, 2).contiguous(),
        f"{prefix}.{layout.down}_bias": experts.down_bias,
    }
