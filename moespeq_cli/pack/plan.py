"""What a pack will hold, settled before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moespeq_cli.pack.dense import model_files
from moespeq_cli.pack.encoding import choose, require_known
from moespeq_cli.pack.routing import load_routing
from moespeq_cli.pack.striping import Routing, read_order, stripe
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.encodings import RAW, TargetEncoding
from runtime.artifacts.gptq_format import effective_group_size
from runtime.artifacts.gptq_import import open_quantized
from runtime.artifacts.heat import hot_half
from runtime.artifacts.manifest import MANIFEST, sha256_file
from runtime.artifacts.quantized import LayerFormat, Quantized
from runtime.artifacts.record import DraftFormat, LinearFormat, RecordLayout, align_up, target_layout
from runtime.errors import ArtifactError, InputError
from runtime.memory.location import ExpertKey
from runtime.memory.sizes import format_size
from runtime.model.families import MoeSpec, dense_names, describe


@dataclass(frozen=True, slots=True)
class Placement:
    """Which shard an expert's two records go to."""

    key: ExpertKey
    shard: int


@dataclass(frozen=True, slots=True)
class PackPlan:
    """Sources, layouts and places of everything that a pack holds."""

    folder: Path
    checkpoint: Checkpoint
    spec: MoeSpec
    quantized: Quantized
    quantized_sha256: str
    routing: Routing | None
    profile_sha256: str | None
    encoding: TargetEncoding
    num_shards: int
    target_layout: RecordLayout
    draft_formats: dict[int, DraftFormat]  # by layer_id
    placements: dict[int, list[Placement]]  # by layer_id, in the order of writing
    dense: list[str]
    model_files: list[Path]  # in the source folder, relative to it

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change between a stopped run and the one that resumes it, or the pack would be another."""
        return {
            "model": self.checkpoint.digest,
            "quantized": self.quantized_sha256,
            "profile": self.profile_sha256,
            "encoding": self.encoding.name,
            "shards": self.num_shards,
        }

    @property
    def draft_layouts(self) -> dict[int, RecordLayout]:
        return {layer: form.layout(self.spec) for layer, form in self.draft_formats.items()}

    def slot_bytes(self, side: str) -> int:
        """The longest that a record of a side can become, padding included."""
        if side == "target":
            return align_up(self.encoding.max_bytes(self.target_layout))
        return max(layout.padded_bytes for layout in self.draft_layouts.values())

    @property
    def target_bytes(self) -> int:
        return self.spec.num_records * self.slot_bytes("target")

    @property
    def draft_bytes(self) -> int:
        return sum(layout.padded_bytes for layout in self.draft_layouts.values()) * self.spec.num_experts

    @property
    def dense_bytes(self) -> int:
        infos = (self.checkpoint.info(name) for name in self.dense)
        return sum(info.end - info.start for info in infos)

    @property
    def total_bytes(self) -> int:
        """Of all files, records no shorter than their slots, headers estimated at 256 bytes a tensor."""
        copied = sum((self.checkpoint.folder / file).stat().st_size for file in self.model_files)
        headers = 256 * (2 * self.spec.num_records + len(self.dense)) + 8192 * self.num_shards
        index = 512 * 2 * self.spec.num_records
        return self.target_bytes + self.draft_bytes + self.dense_bytes + copied + headers + index

    def lines(self) -> list[str]:
        """The plan in words, for the user to read before work starts."""
        spec = self.spec
        how = "co-activation" if self.routing is not None else "round-robin"
        most = "" if self.encoding is RAW else "at most "
        lines = [
            f"{spec.num_records} experts of {len(spec.moe_layers)} layers ({spec.model_type}, {spec.dtype}), "
            f"striped by {how} over {self.num_shards} shard{'s' if self.num_shards > 1 else ''} a side",
            f"target {most}{format_size(self.target_bytes)} ({self.encoding.name}), "
            f"draft {format_size(self.draft_bytes)}, "
            f"dense {format_size(self.dense_bytes)} in {len(self.dense)} tensors",
            *(
                ()
                if self.quantized.is_ours
                else (
                    f"drafts made by another program, {self.quantized.folder}; what else it "
                    "quantised is taken from the model",
                )
            ),
            f"to {self.folder}",
        ]
        if self.routing is not None:
            hot = len(hot_half(self.routing.heat))
            lines.insert(
                2, f"{hot} of {spec.num_records} experts serve half of all uses: run warms its cache with them"
            )
        return lines


def make_plan(
    model: str | Path, quantized: Path, profile: Path | None, folder: Path, num_shards: int, encoding: str
) -> PackPlan:
    """Open the sources, check that they belong together, and decide where everything goes.

    Raises:
        InputError: an unusable model or option, or an artifact of another model.
        ArtifactError: an unfinished or damaged artifact.
    """
    require_known(encoding)
    checkpoint = Checkpoint.open(model)
    spec = describe(checkpoint)
    if not 1 <= num_shards <= spec.num_records:
        raise InputError(
            expected=f"1 to {spec.num_records} shards, the number of routed experts",
            found=str(num_shards),
            mend="pass another --shards; the number of drives that hold the pack is usual",
        )
    source = open_quantized(quantized, checkpoint, spec)
    drafts = {
        layer: _draft_format(source.manifest.layers[str(layer)], spec, f"layer {layer}") for layer in spec.moe_layers
    }
    routing = load_routing(profile, checkpoint.digest) if profile is not None else None
    shards = stripe(len(spec.moe_layers), spec.num_experts, num_shards, routing)
    return PackPlan(
        folder=folder,
        checkpoint=checkpoint,
        spec=spec,
        quantized=source,
        quantized_sha256=source.sha256,
        routing=routing,
        profile_sha256=sha256_file(profile / MANIFEST) if profile is not None else None,
        encoding=choose(encoding, spec, drafts),
        num_shards=num_shards,
        target_layout=target_layout(spec),
        draft_formats=drafts,
        placements={
            layer: [Placement((layer, e), shards[i][e]) for e in read_order(i, spec.num_experts, routing)]
            for i, layer in enumerate(spec.moe_layers)
        },
        dense=dense_names(checkpoint, spec),
        model_files=model_files(checkpoint.folder),
    )


def _draft_format(layer: LayerFormat, spec: MoeSpec, where: str) -> DraftFormat:
    if ("gate_proj" in layer.kept) != ("up_proj" in layer.kept):
        raise ArtifactError(
            expected=f"gate_proj and up_proj of {where} both quantised or both kept, for they share a matrix",
            found=f"only {'gate_proj' if 'gate_proj' in layer.kept else 'up_proj'} kept",
            mend="quantise again with a --skip-modules that names both or neither",
        )

    def linear(projection: str, in_features: int) -> LinearFormat:
        if projection in layer.kept:
            return LinearFormat(0, 0)
        return LinearFormat(
            layer.bits, effective_group_size(in_features, layer.group_size, name=where, bits=layer.bits)
        )

    return DraftFormat(linear("gate_proj", spec.hidden_size), linear("down_proj", spec.moe_intermediate_size))
