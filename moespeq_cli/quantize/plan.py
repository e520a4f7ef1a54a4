"""What a quantisation will do, settled and checked before any of it is done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moespeq_cli.quantize.calibrate import Sequences
from moespeq_cli.quantize.gptq import SolverSettings
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.gptq_format import SUPPORTED_BITS, check_linear, is_kept
from runtime.artifacts.quantized import LayerFormat, linear_name
from runtime.errors import InputError
from runtime.memory.sizes import format_size
from runtime.model.families import PROJECTIONS, MoeSpec, dense_names

METHODS = ("gptq", "rtn")
ALWAYS_SKIPPED = ("gate", "attention", "layernorm", "shared_expert")
SENSITIVE_SHARE = 0.1
MIN_TOKENS = 32  # docs/quantize.md says how it was found


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """The user's choices."""

    model: str
    out: Path
    data: Path | None = None
    samples: int = 128
    seq_len: int | None = None
    bits: int = 4
    group_size: int = 128
    damp_percent: float = 0.01
    scale_search: bool | None = None  # None: on where the solver has one
    token_damping: bool | None = None  # None: on with our solver, off with auto-gptq, which then does as it always does
    solver: str = "batched"
    method: str = "gptq"
    skip_modules: tuple[str, ...] = ALWAYS_SKIPPED
    sensitive_layers: tuple[int, ...] = ()
    sensitive_bits: int = 8
    profile: Path | None = None  # picks the sensitive layers
    sensitive_share: float | None = None  # of the layers that a profile picks; None: SENSITIVE_SHARE
    min_tokens: int = MIN_TOKENS
    seed: int = 0
    device: str = "auto"
    force: bool = False

    def check(self) -> None:
        """Refuse choices that no model could go with.

        Raises:
            InputError: naming the option.
        """
        if self.method not in METHODS:
            raise InputError(
                expected=f"--method {' or '.join(METHODS)}", found=repr(self.method), mend="pass one of these"
            )
        for option, bits in (("--bits", self.bits), ("--sensitive-bits", self.sensitive_bits)):
            if bits not in SUPPORTED_BITS:
                raise InputError(expected=f"{option} of 4 or 8", found=str(bits), mend="pass one of these")
        if self.profile is not None and self.sensitive_layers:
            raise InputError(
                expected="--sensitive-layers or --profile, which picks them",
                found="both",
                mend="leave one of the two out",
            )
        if self.profile is None and self.sensitive_share is not None:
            raise InputError(
                expected="--profile with --sensitive-share", found="none", mend="pass the folder that profile made"
            )
        if not 0 < self.damp_percent <= 1:
            raise InputError(
                expected="--damp-percent above 0 and at most 1, a share of the Hessian's mean diagonal",
                found=str(self.damp_percent),
                mend="pass another, 0.01 is usual",
            )
        for option, value in (
            ("--samples", self.samples),
            ("--seq-len", 1 if self.seq_len is None else self.seq_len),
            ("--min-tokens", self.min_tokens),
        ):
            if value < 1:
                raise InputError(expected=f"{option} of 1 or more", found=str(value), mend="pass another")
        if self.solver == "auto-gptq" and self.scale_search:
            raise InputError(
                expected="--scale-search with --solver batched",
                found="--solver auto-gptq, which takes its scales from the largest weight",
                mend="leave one of the two out",
            )

    @property
    def share(self) -> float:
        """Of the layers that a profile picks."""
        return SENSITIVE_SHARE if self.sensitive_share is None else self.sensitive_share

    def solver_settings(self, bits: int, group_size: int) -> SolverSettings:
        """The settings with which a layer's linears are solved."""
        return SolverSettings(
            bits=bits,
            group_size=group_size,
            damp_percent=self.damp_percent,
            scale_search=self.searches_scales,
            token_damping=self.damps_by_tokens,
            min_tokens=self.min_tokens,
        )

    @property
    def damps_by_tokens(self) -> bool:
        """Whether the damping grows where tokens are few."""
        return self.solver == "batched" if self.token_damping is None else self.token_damping

    @property
    def searches_scales(self) -> bool:
        """Whether clipping is searched for."""
        if self.method == "rtn":
            return False
        return self.solver == "batched" if self.scale_search is None else self.scale_search


@dataclass(frozen=True, slots=True)
class Plan:
    """The work, layer by layer."""

    spec: MoeSpec
    formats: dict[int, LayerFormat]
    dense_bytes: int
    expert_bytes: int  # in the source
    quantized_bytes: int  # of the same experts when done
    hidden_bytes: int  # of the calibration tokens between two layers, at most: a comparison takes some twice more

    @property
    def linears(self) -> int:
        """Linears of routed experts in all."""
        return self.spec.num_records * len(PROJECTIONS)

    @property
    def quantized_linears(self) -> int:
        """Those of them that get codes."""
        return sum(self.spec.num_experts * (len(PROJECTIONS) - len(x.kept)) for x in self.formats.values())

    @property
    def disk_bytes(self) -> int:
        """What the output folder needs at most, the hidden states of two layers among it."""
        return self.dense_bytes + self.quantized_bytes + 2 * self.hidden_bytes + (64 << 20)


def make_plan(checkpoint: Checkpoint, spec: MoeSpec, options: QuantizeOptions, sequences: Sequences) -> Plan:
    """Settle every layer's format and what it comes to.

    Raises:
        InputError: layers that are not there, modules that cannot be chosen, nothing left to quantise.
        ShapeError: a dimension that the groups do not fit, naming the tensor.
    """
    formats = layer_formats(spec, options)
    item_bytes = source_item_bytes(spec)
    dense = sum(checkpoint.tensors[n].end - checkpoint.tensors[n].start for n in dense_names(checkpoint, spec))
    plan = Plan(
        spec=spec,
        formats=formats,
        dense_bytes=dense,
        expert_bytes=spec.num_records * spec.expert_parameters * item_bytes,
        quantized_bytes=sum(layer_bytes(spec, layer, item_bytes) for layer in formats.values()),
        hidden_bytes=sequences.tokens * spec.hidden_size * 4 * (3 if options.sensitive_layers else 1),
    )
    if plan.quantized_linears == 0:
        raise InputError(
            expected="at least one linear of the routed experts to quantise",
            found=f"all {plan.linears} kept: --skip-modules names them, or they have fewer than 64 input features",
            mend="shorten --skip-modules, or pass a wider model",
        )
    return plan


def source_item_bytes(spec: MoeSpec) -> int:
    """Bytes of a weight in the source."""
    return {"F32": 4}.get(spec.dtype, 2)


def layer_formats(spec: MoeSpec, options: QuantizeOptions) -> dict[int, LayerFormat]:
    """How the experts of every MoE layer will be held."""
    unknown = sorted(set(options.sensitive_layers) - set(spec.moe_layers))
    if unknown:
        raise InputError(
            expected=f"--sensitive-layers among the layers with routed experts, {_ranges(spec.moe_layers)}",
            found=", ".join(map(str, unknown)),
            mend="pass true layer numbers; dense layers are counted but have no experts",
        )
    kept_projections, kept_layers = _kept(options.skip_modules, spec)
    formats = {}
    for layer_id in spec.moe_layers:
        sensitive = layer_id in options.sensitive_layers
        bits, group_size = (options.sensitive_bits, -1) if sensitive else (options.bits, options.group_size)
        kept = []
        for projection in PROJECTIONS:
            out_features, in_features = linear_shape(spec, projection)
            if projection in kept_projections or layer_id in kept_layers or is_kept(in_features):
                kept.append(projection)
            else:
                check_linear(out_features, in_features, group_size, bits, linear_name(layer_id, 0, projection))
        formats[layer_id] = LayerFormat(bits, group_size, tuple(kept))
    return formats


def plain_format(form: LayerFormat, options: QuantizeOptions) -> LayerFormat:
    """What a sensitive layer would be if it were not one."""
    return LayerFormat(options.bits, options.group_size, form.kept)


def linear_shape(spec: MoeSpec, projection: str) -> tuple[int, int]:
    """(out_features, in_features) of a projection."""
    hidden, inner = spec.hidden_size, spec.moe_intermediate_size
    return (hidden, inner) if projection == "down_proj" else (inner, hidden)


def plan_lines(plan: Plan, options: QuantizeOptions, sequences: Sequences) -> list[str]:
    """The plan for a person to read."""
    spec = plan.spec
    how = f"{options.bits} bits, group size {options.group_size}, symmetric, {options.method}"
    if options.method == "gptq":
        how += f" by the {options.solver} solver"
    lines = [
        f"quantize {options.model} ({spec.model_type})",
        f"  experts      {len(spec.moe_layers)} layers x {spec.num_experts} experts x 3 projections = {plan.linears} "
        f"linears, {format_size(plan.expert_bytes)} of {spec.dtype}",
        f"  to           {how}: {format_size(plan.quantized_bytes)}",
        f"  copied       {format_size(plan.dense_bytes)} that is not a routed expert, bit for bit",
        f"  calibration  {len(sequences.ids)} sequences of at most {sequences.seq_len} tokens, {sequences.tokens} in "
        f"all, from {sequences.source}",
        f"  into         {options.out}",
    ]
    if options.sensitive_layers:
        chosen = _ranges(tuple(sorted(options.sensitive_layers)))
        lines.insert(3, f"  sensitive    layers {chosen}: {options.sensitive_bits} bits, one scale an output channel")
    kept = plan.linears - plan.quantized_linears
    if kept:
        lines.insert(3, f"  kept         {kept} linears stay {spec.dtype} (skipped, or fewer than 64 input features)")
    return lines


def _kept(skip_modules: tuple[str, ...], spec: MoeSpec) -> tuple[set[str], set[int]]:
    """Projections and layers that --skip-modules adds to what is always skipped."""
    missing = [name for name in ALWAYS_SKIPPED if name not in skip_modules]
    if missing:
        raise InputError(
            expected=f"--skip-modules with {', '.join(ALWAYS_SKIPPED)}: only routed experts are quantised",
            found=f"{', '.join(missing)} left out",
            mend="add what else to keep (down_proj, or gate_proj and up_proj, or layers.N), take nothing away",
        )
    projections: set[str] = set()
    layers: set[int] = set()
    for name in skip_modules:
        if name in ALWAYS_SKIPPED:
            continue
        number = name.removeprefix("layers.")
        if name in PROJECTIONS:
            projections.add(name)
        elif name != number and number.isdecimal() and int(number) in spec.moe_layers:
            layers.add(int(number))
        else:
            raise InputError(
                expected=f"--skip-modules of {', '.join((*ALWAYS_SKIPPED, *PROJECTIONS))} "
                f"or layers.N with N in {_ranges(spec.moe_layers)}",
                found=repr(name),
                mend="correct the name, or leave it out",
            )
    if ("gate_proj" in projections) != ("up_proj" in projections):
        raise InputError(
            expected="gate_proj and up_proj both in --skip-modules, or neither: they share one matrix in a pack",
            found=", ".join(sorted(projections)),
            mend="name both or neither",
        )
    return projections, layers


def layer_bytes(spec: MoeSpec, layer: LayerFormat, item_bytes: int) -> int:
    """Bytes of a layer's routed experts in the folder."""
    total = 0
    for projection in PROJECTIONS:
        out_features, in_features = linear_shape(spec, projection)
        if projection in layer.kept:
            total += out_features * in_features * item_bytes
        else:
            size = check_linear(out_features, in_features, layer.group_size, layer.bits)
            groups = in_features // size
            total += out_features * in_features * layer.bits // 8 + 4 * in_features
            total += groups * out_features * 2 + groups * out_features * layer.bits // 8
        total += out_features * item_bytes if spec.has_bias else 0
    return total * spec.num_experts


def _ranges(numbers: tuple[int, ...]) -> str:
    """0-3, 5 for (0, 1, 2, 3, 5)."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
