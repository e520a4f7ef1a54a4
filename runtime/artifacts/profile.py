"""The profile artifact: which experts a model's router chooses on known texts, and its reader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from runtime.artifacts.manifest import FileEntry, check_files, load_manifest
from runtime.artifacts.safetensors_file import NAMES, as_tensor, pread, read_header
from runtime.errors import ArtifactError, InputError

ROUTING = "routing.safetensors"
SENSITIVITY = "sensitivity.safetensors"
EXPERT_LINEARS = ("gate_proj", "up_proj", "down_proj")
MEND = "make the profile artifact again with `moespeq profile --force`"


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """How the quantised experts compare with the source's on the same texts, teacher-forced.

    Every dict has the domains as keys. A share is None where nothing could be compared ("n/a"), never 0 by default.
    """

    quantized_sha256: str  # of the manifest.json of the quantized artifact
    agreement: dict[str, float | None]  # mean over layers of the routing agreement, the draft on its own hidden states
    agreement_next: dict[str, float | None]  # the same where the experts of one layer only are the draft's
    agreement_by_layer: dict[str, tuple[float | None, ...]]  # `agreement` in the order of moe_layers
    greedy: dict[str, float | None]  # share of positions at which both models' most likely token is the same
    overlap: dict[str, float | None]  # mean sum of min(p, q): the acceptance to expect when sampling at temperature 1
    compared_tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class SensitivityFigures:
    """On what the sensitivity in sensitivity.safetensors was measured; dicts have the domains as keys."""

    bits: int  # of the rounding whose error is weighed
    group_size: int  # input channels a scale; a linear whose inputs it does not divide has one scale a row
    sequences: int
    tokens: dict[str, int]  # predicted ones: all but the first of each sequence
    loss: dict[str, float | None]  # mean cross entropy of these, nats a token
    linears: tuple[str, ...]  # the rows of `domains`, and the names of the other tensors


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """The model with the linears of one class rounded, compared with the model as it is; dicts by domain."""

    module_class: str  # a key of moespeq_cli.profile.modules.CLASSES
    bits: int
    weights: int  # how many were rounded
    agreement: dict[str, float | None]  # share of a token's experts that are chosen still, over all layers
    same_set: dict[str, float | None]  # share of tokens, over all layers, whose experts are all the same
    kl: dict[str, float | None]  # mean KL divergence of the next-token distribution from the model's, nats
    greedy: dict[str, float | None]  # share of positions with the same most likely token
    loss: dict[str, float | None]  # mean cross entropy of the text, nats a token
    exact_match: float | None  # share of the embedded problems answered right; None where not measured


@dataclass(frozen=True, slots=True)
class ProbeFigures:
    """The direct probe: one class of linears rounded at a time."""

    tokens: dict[str, int]
    loss: dict[str, float | None]  # of the model as it is
    problems: int  # embedded ones that were answered
    exact_match: float | None  # of the model as it is
    rows: tuple[ProbeRow, ...]


@dataclass(frozen=True, slots=True)
class CacheCurve:
    """Hit rates that the recorded routing would have in caches of several sizes, without prefetching."""

    tokens: int  # replayed ones
    window: int  # tokens that "lookahead" sees, the running one included
    foresight: str  # of "lookahead": "draft", its own routing, or "target", as if the draft were always right
    slots: tuple[int, ...]
    hits: dict[str, tuple[float, ...]]  # by policy: lru, lookahead, belady


@dataclass(frozen=True, slots=True)
class ProfileManifest:
    """What `profile` promises to `pack`, `run` and `quantize`."""

    KIND: ClassVar[str] = "profile"
    VERSION: ClassVar[int] = 2

    model_digest: str
    model_type: str
    moe_layers: tuple[int, ...]  # true layer numbers; the layer axis of every tensor is in this order
    num_experts: int
    top_k: int
    domains: dict[str, int]  # tokens by name; the domain axis of every tensor is in the sorted order of the names
    sequences: dict[str, int]
    reuse_edges: tuple[int, ...]  # bucket b of reuse_histogram: distances from edges[b], below edges[b + 1]
    trace_tokens: int
    settings: dict[str, str]  # the choices that make the result what it is
    files: dict[str, FileEntry]
    draft: DraftFigures | None = None
    sensitivity: SensitivityFigures | None = None
    probe: ProbeFigures | None = None
    cache: CacheCurve | None = None

    @property
    def domain_names(self) -> tuple[str, ...]:
        """The domains in the order of the tensors' domain axis."""
        return tuple(sorted(self.domains))

    def tensor_forms(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of every tensor of routing.safetensors; -1 stands for the number of traced sequences."""
        layers, experts, domains = len(self.moe_layers), self.num_experts, len(self.domains)
        trace = (self.trace_tokens, layers, self.top_k)
        forms: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "counts": (torch.int64, (domains, layers, experts)),
            "coactivation": (torch.int64, (layers, experts, experts)),
            "reuse_histogram": (torch.int64, (domains, layers, len(self.reuse_edges) - 1)),
            "first_uses": (torch.int64, (domains, layers)),
            "reuse_mean": (torch.float64, (domains, layers)),
            "kept_from_previous": (torch.float64, (domains, layers)),
            "trace": (torch.int16, trace),
            "trace_starts": (torch.int64, (-1,)),
            "trace_domain": (torch.int64, (-1,)),
        }
        if self.draft is not None:
            forms["agreement"] = (torch.float64, (domains, layers))
            forms["agreement_next"] = (torch.float64, (domains, layers))
            forms["draft_trace"] = (torch.int16, trace)
        return forms

    def tensor_bounds(self) -> dict[str, int]:
        """By tensor of counts or places, what its numbers, none below 0, stay below."""
        tokens = sum(self.domains.values())
        bounds = dict.fromkeys(("counts", "coactivation"), tokens + 1)
        bounds |= dict.fromkeys(("reuse_histogram", "first_uses"), tokens * self.top_k + 1)
        bounds |= {"trace": self.num_experts, "trace_domain": len(self.domains)}
        return bounds if self.draft is None else bounds | {"draft_trace": self.num_experts}


def expert_linear(layer_id: int, projection: str) -> str:
    """The name of the routed experts' linears of one kind in one layer, all experts together."""
    return f"layers.{layer_id}.mlp.experts.{projection}"


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What rounding does to the loss: squared gradient x squared rounding error, nats a token, by linear.

    Half of it is the second-order estimate of what rounding that linear alone adds to the loss.

    Attributes:
        figures: on what it was measured.
        channels: float32 [out] a linear, [num_experts, out] for the routed experts: by output channel, all domains.
        domains: float64 [linears, domains]: all channels, each domain on its own tokens; 0 where it has none.
    """

    figures: SensitivityFigures
    channels: dict[str, Tensor]
    domains: Tensor

    def total(self, name: str) -> float:
        """The whole linear, or the linears of all experts."""
        return float(self.channels[name].sum(dtype=torch.float64))

    def experts_of(self, layer_id: int, domain: int | None = None) -> float:
        """The routed experts of a layer, all projections; of one domain where its place is given."""
        names = [expert_linear(layer_id, projection) for projection in EXPERT_LINEARS]
        if domain is None:
            return sum(self.total(name) for name in names)
        return sum(float(self.domains[self.figures.linears.index(name), domain]) for name in names)


@dataclass(frozen=True, slots=True)
class TracedSequence:
    """The recorded choices of one sequence, int16 [tokens, layers, top_k]: the target's and the draft's."""

    domain: str
    target: Tensor
    draft: Tensor | None


@dataclass(frozen=True)
class Profile:
    """A finished profile, checked on opening.

    Attributes:
        tensors: those of routing.safetensors. With D domains (sorted names), L layers with experts, E experts:
            counts int64 [D, L, E]: tokens that chose the expert.
            coactivation int64 [L, E, E]: tokens that chose both, all domains; its diagonal is the sum of counts.
            reuse_histogram int64 [D, L, B]: uses by the distance in tokens since the expert's last use in the sequence.
            first_uses int64 [D, L]: uses without an earlier one in the sequence; histogram + first uses = counts.
            reuse_mean float64 [D, L]: mean of those distances; NaN where no expert was used twice.
            kept_from_previous float64 [D, L]: share of a token's experts that the previous token used; NaN where every
                sequence has one token.
            trace int16 [tokens, L, top_k], trace_starts and trace_domain int64 [sequences]: the choices themselves, for
                replaying cache policies without the model.
            agreement, agreement_next float64 [D, L] and draft_trace, where a draft was measured; NaN where nothing was
                compared.
    """

    folder: Path
    manifest: ProfileManifest
    tensors: dict[str, Tensor]

    @classmethod
    def open(cls, folder: str | Path, verify: bool = False) -> Profile:
        """Read a folder.

        Args:
            folder: the artifact.
            verify: compare the checksum too.

        Raises:
            ArtifactError: unfinished, another version, a file of another size, or tensors that are not as promised.
        """
        place = Path(folder)
        manifest = load_manifest(place, ProfileManifest)
        if ROUTING not in manifest.files:
            raise ArtifactError(expected=f"{ROUTING} among the files of {place}", found="none of that name", mend=MEND)
        check_files(place, manifest.files, "profile", contents=verify)
        tensors = _read(place / ROUTING)
        _check(place, manifest, tensors)
        return cls(place, manifest, tensors)

    def sensitivity(self) -> Sensitivity:
        """What the gradient half of the profile found.

        Raises:
            ArtifactError: it was not measured, or the tensors are not as promised.
        """
        figures = self.manifest.sensitivity
        if figures is None or SENSITIVITY not in self.manifest.files:
            raise ArtifactError(
                expected=f"a profile with sensitivity in {self.folder}",
                found="one without",
                mend="make it with `moespeq profile --force`, --sensitivity-tokens above 0",
            )
        tensors = _read(self.folder / SENSITIVITY)
        domains = tensors.pop("domains", torch.empty(0))
        found = Sensitivity(figures, tensors, domains)
        _check_sensitivity(self.folder, self.manifest, found)
        return found

    def layer_row(self, layer_id: int) -> int:
        """The place of a true layer number on the layer axis.

        Raises:
            ArtifactError: the layer has no routed experts.
        """
        if layer_id not in self.manifest.moe_layers:
            raise ArtifactError(
                expected=f"one of the layers {list(self.manifest.moe_layers)} in {self.folder}",
                found=f"layer {layer_id}",
                mend="pass the profile of this model",
            )
        return self.manifest.moe_layers.index(layer_id)

    def heat(self) -> dict[tuple[int, int], float]:
        """By (layer_id, expert_id), the share of all tokens that chose the expert."""
        counts = self.tensors["counts"].sum(0)
        tokens = max(sum(self.manifest.domains.values()), 1)
        return {
            (layer_id, expert_id): int(counts[row, expert_id]) / tokens
            for row, layer_id in enumerate(self.manifest.moe_layers)
            for expert_id in range(self.manifest.num_experts)
        }

    def traces(self) -> Iterator[TracedSequence]:
        """The recorded sequences one by one."""
        starts = [*self.tensors["trace_starts"].tolist(), self.manifest.trace_tokens]
        names = self.manifest.domain_names
        for index, domain in enumerate(self.tensors["trace_domain"].tolist()):
            span = slice(starts[index], starts[index + 1])
            draft = self.tensors["draft_trace"][span] if self.manifest.draft is not None else None
            yield TracedSequence(names[domain], self.tensors["trace"][span], draft)

    def replay_rows(self, domain: str | None = None) -> list[list[list[tuple[int, int]]]]:
        """The target's recorded choices as [token][layer] lists of (layer_id, expert_id), layers in order.

        Args:
            domain: only the sequences of this one.
        """
        layers = self.manifest.moe_layers
        rows = []
        for sequence in self.traces():
            if domain in (None, sequence.domain):
                for token in sequence.target.tolist():
                    rows.append([[(layers[i], expert) for expert in chosen] for i, chosen in enumerate(token)])
        return rows


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return {
            name: as_tensor(pread(path, info.start, info.end - info.start), info.dtype, info.shape)
            for name, info in read_header(path, MEND).items()
        }
    except InputError as error:
        raise ArtifactError(expected=error.expected, found=error.found, mend=MEND) from error


def _check_sensitivity(folder: Path, manifest: ProfileManifest, found: Sensitivity) -> None:
    names = set(found.figures.linears)
    experts = {expert_linear(layer_id, p) for layer_id in manifest.moe_layers for p in EXPERT_LINEARS}
    facts: list[tuple[str, object, object]] = [
        ("the tensors that the manifest names", sorted(names), sorted(found.channels)),
        ("linears of all routed experts", [], sorted(experts - names)),
        ("domains", (torch.float64, (len(names), len(manifest.domains))), _form(found.domains)),
    ]
    facts += [
        (f"{name} by expert", (torch.float32, manifest.num_experts, 2), (t.dtype, t.shape[0], t.dim()))
        for name, t in found.channels.items()
        if name in experts
    ]
    facts += [
        (f"{name} finite and not below 0", True, bool(t.isfinite().all() and (t >= 0).all()))
        for name, t in found.channels.items()
    ]
    for what, expected, have in facts:
        if expected != have:
            raise ArtifactError(
                expected=f"{what}: {expected!s:.200} in {folder / SENSITIVITY}", found=f"{have!s:.200}", mend=MEND
            )


def _form(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _check(folder: Path, manifest: ProfileManifest, tensors: dict[str, Tensor]) -> None:
    for name, (dtype, shape) in manifest.tensor_forms().items():
        tensor = tensors.get(name)
        fits = (
            tensor is not None
            and tensor.dtype == dtype
            and tensor.dim() == len(shape)
            and all(want in (-1, have) for want, have in zip(shape, tensor.shape, strict=True))
        )
        if not fits:
            found = "none" if tensor is None else f"{NAMES[tensor.dtype]} {list(tensor.shape)}"
            raise ArtifactError(
                expected=f"{name} as {NAMES[dtype]} {list(shape)} in {folder / ROUTING}", found=found, mend=MEND
            )
    starts = tensors["trace_starts"]
    bounded = [0, *starts.tolist(), manifest.trace_tokens]
    if len(starts) != len(tensors["trace_domain"]) or bounded != sorted(bounded):
        raise ArtifactError(
            expected=f"trace_starts rising to at most {manifest.trace_tokens}, one a sequence, in {folder / ROUTING}",
            found=f"{len(starts)} starts for {len(tensors['trace_domain'])} sequences, the last {bounded[-2]}",
            mend=MEND,
        )
    for name, limit in manifest.tensor_bounds().items():
        outside = tensors[name][(tensors[name] < 0) | (tensors[name] >= limit)]
        if len(outside):
            raise ArtifactError(
                expected=f"{name} from 0 to {limit - 1} in {folder / ROUTING}",
                found=f"{int(outside[0])}",
                mend=MEND,
            )
