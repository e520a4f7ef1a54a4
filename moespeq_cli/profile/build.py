"""Making the artifact: measure, write the data, the pictures and the page, and the manifest last."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from moespeq_cli import console
from moespeq_cli.device import device_memory
from moespeq_cli.profile import charts, charts_sensitivity, pictures, report, work
from moespeq_cli.profile.backward import measure_sensitivity
from moespeq_cli.profile.measure import NEXT_LAYER_TOKENS, Measurement, TextSequence, measure, prefix
from moespeq_cli.profile.probing import PROBE_COPIES, measure_probe
from moespeq_cli.profile.replay import cache_curve
from moespeq_cli.profile.work import Work
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.folder import check_free_space, claim_output, refuse_other_kind, refuse_strangers, write_guard
from runtime.artifacts.manifest import (
    MANIFEST,
    FileEntry,
    is_finished,
    require_same_model,
    save_manifest,
    sha256_bytes,
    sha256_file,
)
from runtime.artifacts.profile import (
    ROUTING,
    SENSITIVITY,
    ProbeFigures,
    Profile,
    ProfileManifest,
    SensitivityFigures,
)
from runtime.artifacts.quantized import Quantized
from runtime.errors import ArtifactError
from runtime.model.families import MoeSpec
from runtime.model.stream import CPU, LayerStream

REPORT = "report.html"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class ProfileJob:
    """All that decides a profile.

    Attributes:
        checkpoint, spec: the model.
        sequences: in the order in which they are traced.
        text_source: says where the texts come from, for the settings.
        quantized: the draft, or None to measure the target alone.
        dtype: of the arithmetic, a key of DTYPES.
        trace_tokens: how many tokens' choices are kept.
        sensitivity_tokens: on how many tokens at most the backward pass goes; 0 leaves it out.
        probe_tokens: on how many tokens at most one class of linears at a time is rounded; 0 leaves it out.
        probe_problems: how many embedded problems are answered then; only for the embedded model.
        device: where the layers compute.
    """

    checkpoint: Checkpoint
    spec: MoeSpec
    sequences: list[TextSequence]
    text_source: str
    quantized: Quantized | None
    dtype: str
    trace_tokens: int
    sensitivity_tokens: int = 0
    probe_tokens: int = 0
    probe_problems: int = 0
    device: torch.device = CPU

    @property
    def num_backward(self) -> int:
        """How many first sequences the backward pass takes."""
        return self._first(self.sensitivity_tokens)

    @property
    def num_probed(self) -> int:
        """How many first sequences the probe takes."""
        return self._first(self.probe_tokens)

    def _first(self, max_tokens: int) -> int:
        lengths = [len(sequence.input_ids) for sequence in self.sequences]
        return prefix(lengths, max_tokens) if max_tokens else 0

    @property
    def steps(self) -> int:
        """Of the progress bar: layers forward, the draft's logits, layers and head backward, layers and head probed."""
        parts = (self.num_backward > 0) + (self.num_probed > 0)
        return self.spec.num_layers + (self.quantized is not None) + parts * (self.spec.num_layers + 1)

    def domains(self) -> dict[str, int]:
        """Tokens by domain."""
        tokens: dict[str, int] = {}
        for sequence in self.sequences:
            tokens[sequence.domain] = tokens.get(sequence.domain, 0) + len(sequence.input_ids)
        return tokens

    def settings(self) -> dict[str, str]:
        """What an equal profile has equal."""
        rows = [f"{s.domain}\0{','.join(map(str, s.input_ids.tolist()))}\n".encode() for s in self.sequences]
        return {
            "device": self.device.type,
            "dtype": self.dtype,
            "quantized": "none" if self.quantized is None else quantized_sha256(self.quantized),
            "sensitivity_tokens": str(self.sensitivity_tokens),
            "probe_tokens": str(self.probe_tokens),
            "probe_problems": str(self.probe_problems),
            "text_digest": sha256_bytes(b"".join(rows)),
            "text_source": self.text_source,
            "trace_tokens": str(self.trace_tokens),
        }

    def activation_bytes(self) -> int:
        """Hidden states in memory at the worst time: before and after a layer, of the target and the draft."""
        copies = 3 if self.quantized is None else 5
        routed = copies * sum(len(s.input_ids) for s in self.sequences) * DTYPES[self.dtype].itemsize
        probed = PROBE_COPIES * sum(len(s.input_ids) for s in self.sequences[: self.num_probed]) * 4
        return max(routed, probed) * self.spec.hidden_size

    def data_bytes(self) -> int:
        """Size of the tensors, roughly, room for the pictures, and the unfinished work beside them."""
        spec = self.spec
        layers, experts = len(spec.moe_layers), spec.num_experts
        sums = 8 * layers * (experts * experts + len(self.domains()) * (experts + 32))
        channels = 12 * layers * experts * (2 * spec.moe_intermediate_size + spec.hidden_size)
        tokens = sum(len(sequence.input_ids) for sequence in self.sequences[: self.num_backward])
        inputs = (spec.num_layers + 3) * tokens * spec.hidden_size * 4
        unfinished = 2 * self.activation_bytes() + inputs + (channels if tokens else 0)
        return sums + 4 * self.trace_tokens * layers * spec.top_k + 8_000_000 + unfinished


def quantized_sha256(quantized: Quantized) -> str:
    """What names a quantized artifact: the digest of its manifest, which holds the digests of its files."""
    return sha256_file(quantized.folder / MANIFEST)


def open_draft(folder: Path | None, fallback: Path, model_digest: str) -> Quantized | None:
    """The quantized artifact to compare with.

    Args:
        folder: the one asked for, which must fit.
        fallback: where one may lie; used only if it is finished and of this model.
        model_digest: of the model that is profiled.

    Raises:
        ArtifactError: the one asked for is unfinished or damaged.
        InputError: the one asked for is of another model.
    """
    if folder is None and not is_finished(fallback):
        return None
    quantized = Quantized.open(folder or fallback)
    if folder is not None:
        require_same_model("quantized", folder, quantized.manifest.model_digest, model_digest)
    if quantized.manifest.model_digest == model_digest:
        return quantized
    console.note(f"{fallback} is of another model: agreement with a draft is not measured")
    return None


OWN_NAMES = re.compile(  # of what a profile's folder holds, finished or not
    r"\.lock|work|(routing|sensitivity)\.safetensors(\.part)?|report\.html(\.part)?|[a-z0-9-]+\.png|"
    r"(manifest|progress)\.json(\.part)?"
)


_IN_WORDS = {
    "model": ("of this model", "one of another model"),
    "quantized": ("with this draft", "one with another draft, or without"),
    "text_digest": ("of the same sequences", "one of others (--data, --samples or --seq-len)"),
}  # settings that are digests: what is expected, and what is found where they differ


def find_identical(out: Path, job: ProfileJob, force: bool) -> Profile | None:
    """The finished profile in `out` if it is what the job would make; None where the way is free.

    It is free, too, where another profile lies but the job was begun to replace it (with --force) and stopped.

    Raises:
        ArtifactError: another artifact is there, and it is not to be replaced.
    """
    refuse_other_kind(out, ProfileManifest.KIND)
    refuse_strangers(out, OWN_NAMES, "profile")
    wanted = {**job.settings(), "model": job.checkpoint.digest}
    if force or not is_finished(out) or work.begun_with(out / work.FOLDER, wanted):
        return None
    try:
        profile = Profile.open(out)
    except ArtifactError as error:
        raise ArtifactError(
            expected=error.expected, found=error.found, mend="choose another --out, or replace this with --force"
        ) from error
    present = {"device": "cpu", **profile.manifest.settings, "model": profile.manifest.model_digest}
    for name in sorted(wanted):
        if wanted[name] != present.get(name):
            values = (f"with {name} = {wanted[name]}", f"one with {name} = {present.get(name)}")
            expected, found = _IN_WORDS.get(name, values)
            raise ArtifactError(
                expected=f"a profile {expected} in {out}, or none",
                found=found,
                mend="replace it with --force, or choose another --out",
            )
    return profile


@dataclass(frozen=True, slots=True)
class _Measured:
    """All that the folder is written from."""

    routing: Measurement
    sensitivity: tuple[SensitivityFigures, dict[str, Tensor]] | None
    probe: ProbeFigures | None


def build(job: ProfileJob, out: Path, force: bool = False) -> Profile:
    """Measure and write; what was in `out` stays as it is until the new data is complete.

    Args:
        job: what to measure.
        out: the folder.
        force: throw away what a stopped run had measured.

    Raises:
        ArtifactError: another process is writing there, or the folder holds work begun with other settings.
        StorageError: the disk is full or cannot be written.
    """
    check_free_space(out, job.data_bytes(), "the profile")
    with claim_output(out):
        place = out / work.FOLDER
        if force:
            work.remove(place)
        unfinished = Work(place, {**job.settings(), "model": job.checkpoint.digest}, job.num_backward)
        with console.progress("profiling, layers", job.steps) as bar, device_memory():
            measured = _measure(job, unfinished, bar)
        with write_guard("the profile", out):
            made = _write(job, measured, out)
        unfinished.remove()
        return made


def _measure(job: ProfileJob, unfinished: Work, bar: console.Progress) -> _Measured:
    stream = LayerStream(job.checkpoint, job.spec, DTYPES[job.dtype], device=job.device)
    draft = "" if job.quantized is None else quantized_sha256(job.quantized)
    routing = measure(stream, job.sequences, job.quantized, draft, job.trace_tokens, bar.advance, unfinished)
    sensitivity, probe = None, None
    names = sorted(job.domains())
    if stream.dtype != torch.float32 and job.num_backward + job.num_probed:
        stream = LayerStream(job.checkpoint, job.spec, torch.float32, device=job.device)
    if job.num_backward:
        sequences = job.sequences[: job.num_backward]
        sensitivity = measure_sensitivity(stream, sequences, names, unfinished, bar.advance)
    if job.num_probed:
        sequences = job.sequences[: job.num_probed]
        probe = measure_probe(stream, sequences, names, job.probe_problems, unfinished, bar.advance)
    return _Measured(routing, sensitivity, probe)


def _write(job: ProfileJob, measured: _Measured, out: Path) -> Profile:
    (out / MANIFEST).unlink(missing_ok=True)
    for old in (*out.glob("*.png"), out / SENSITIVITY):  # of domains and measurements that this profile may not have
        old.unlink(missing_ok=True)
    routing, files = measured.routing, {}
    _write_tensors(out / ROUTING, routing.tensors)
    files[ROUTING] = FileEntry.of(out / ROUTING)
    if measured.sensitivity is not None:
        _write_tensors(out / SENSITIVITY, measured.sensitivity[1])
        files[SENSITIVITY] = FileEntry.of(out / SENSITIVITY)
    manifest = ProfileManifest(
        model_digest=job.checkpoint.digest,
        model_type=job.spec.model_type,
        moe_layers=job.spec.moe_layers,
        num_experts=job.spec.num_experts,
        top_k=job.spec.top_k,
        domains=job.domains(),
        sequences={name: sum(s.domain == name for s in job.sequences) for name in job.domains()},
        reuse_edges=routing.edges,
        trace_tokens=len(routing.tensors["trace"]),
        settings=job.settings(),
        files=files,
        draft=routing.draft,
        sensitivity=None if measured.sensitivity is None else measured.sensitivity[0],
        probe=measured.probe,
    )
    manifest = replace(manifest, cache=cache_curve(Profile(out, manifest, routing.tensors)))
    profile = Profile(out, manifest, routing.tensors)
    _draw(profile, out)
    save_manifest(out, manifest)
    return profile


def _draw(profile: Profile, out: Path) -> None:
    (out / REPORT).write_text(report.page(profile, NEXT_LAYER_TOKENS), encoding="utf-8")
    if not pictures.available():
        console.note("no PNG files: matplotlib (moespeq[report]) is not installed; report.html has the same pictures")
        return
    for heatmap in charts.heatmaps(profile):
        pictures.save_heatmap(heatmap, out)
    lines = [
        *charts.line_charts(profile),
        charts_sensitivity.cache_chart(profile),
        charts_sensitivity.divergence_chart(profile),
    ]
    for chart in lines:
        if chart is not None:
            pictures.save_lines(chart, out)
    matrices = charts_sensitivity.coactivation_charts(profile)
    pictures.save_matrices(matrices, out, "coactivation", "Experts chosen together, relative to chance")
    if profile.manifest.sensitivity is not None:
        sensitivity = profile.sensitivity()
        pictures.save_bars(charts_sensitivity.class_bars(sensitivity), out)
        pictures.save_bars(charts_sensitivity.layer_bars(profile, sensitivity), out)
        pictures.save_heatmap(charts_sensitivity.expert_heatmap(profile, sensitivity), out)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
    with path.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
