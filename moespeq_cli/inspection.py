"""The facts of an artifact, a model folder or a deployment profile, in the order in which they are told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.manifest import (
    MANIFEST,
    PROGRESS,
    FileEntry,
    format_version,
    is_finished,
    read_json,
    sha256_file,
)
from runtime.artifacts.pack import Pack, PackManifest
from runtime.artifacts.profile import Profile, ProfileManifest
from runtime.artifacts.quantized import Quantized, QuantizedManifest
from runtime.config import known_profile, load_profile, make_settings
from runtime.errors import ArtifactError, InputError
from runtime.memory.sizes import format_size

STAGES = ("quantized", "profile", "pack")  # the folders of an artifacts folder


@dataclass(slots=True)
class Facts:
    """What is told of something.

    Attributes:
        rows: name to a value or a list of lines.
        numbers: what some of them say in words, for programs.
    """

    rows: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The same as one object; names become keys."""
        return {name.replace(" ", "_"): value for name, value in self.rows.items()} | self.numbers


def describe_path(path: Path, artifacts: Path, verify: bool) -> Facts:
    """Open whatever lies at a path and tell of it.

    Args:
        path: a folder or file, or the name of a deployment profile that comes with moespeq.
        artifacts: where the artifacts lie with which it may go.
        verify: read the files and compare their checksums.

    Raises:
        InputError: nothing there, or nothing that is known.
        ArtifactError: an artifact that is unfinished, damaged or of another version.
    """
    if not path.exists() and path == Path(path.name):
        path = known_profile(path.name) or path
    if path.is_file():
        return _deployment(path)
    if not path.is_dir():
        raise InputError(
            expected=f"an artifact, a model or a deployment profile at {path}",
            found="nothing of that name",
            mend="pass the path of a folder or a YAML file, or the name of a profile that comes with moespeq",
        )
    if is_finished(path):
        body = read_json(path / MANIFEST, "a manifest")
        kind = body.get("kind") if isinstance(body, dict) else None
        tellers = {"quantized": _quantized, "profile": _profile, "pack": _pack}
        if kind not in tellers:
            raise ArtifactError(
                expected=f"a manifest of kind {', '.join(tellers)} in {path}",
                found=f"{kind!r:.80}",
                mend="pass another",
            )
        facts = tellers[str(kind)](path, verify)
        facts.rows["goes with"] = _companions(path, facts, artifacts)
        return facts
    if (path / PROGRESS).is_file() or (path / "work" / PROGRESS).is_file():
        raise ArtifactError(
            expected=f"a finished artifact in {path}",
            found="an unfinished one (progress.json but no manifest.json)",
            mend="repeat the command that was stopped; it goes on where it was",
        )
    if (path / "config.json").is_file():
        return _model(path)
    stages = [stage for stage in STAGES if is_finished(path / stage)]
    if stages:
        raise InputError(
            expected=f"one artifact at {path}",
            found=f"a folder of artifacts: {', '.join(stages)}",
            mend=f"pass one of them, such as {path / stages[0]}",
        )
    raise InputError(
        expected=f"an artifact, a model or a deployment profile at {path}",
        found="a folder with neither manifest.json nor config.json",
        mend="pass the folder that a command printed",
    )


def _head(kind: str, cls: type, folder: Path, files: dict[str, FileEntry], verify: bool) -> dict[str, Any]:
    total = sum(entry.size_bytes for entry in files.values())
    checked = (
        "all files read, sha256 as the manifest says" if verify else "sizes as the manifest says (--verify reads all)"
    )
    return {
        "kind": f"{kind}, format version {format_version(cls)}",
        "path": str(folder),
        "manifest sha256": sha256_file(folder / MANIFEST),
        "size": f"{format_size(total)} ({total} bytes) in {len(files)} files",
        "checked": checked,
    }


def _of_files(rows: dict[str, Any], files: dict[str, FileEntry]) -> Facts:
    return Facts(rows, {"size_bytes": sum(entry.size_bytes for entry in files.values()), "num_files": len(files)})


def _file_rows(files: dict[str, FileEntry]) -> list[str]:
    width = max(len(name) for name in files)
    return [f"{n:<{width}}  {format_size(e.size_bytes):>9}  {e.sha256[:16]}" for n, e in sorted(files.items())]


def _settings(settings: dict[str, str]) -> list[str]:
    return [f"{name} = {value}" for name, value in sorted(settings.items()) if value != ""]


def _quantized(folder: Path, verify: bool) -> Facts:
    manifest = Quantized.open(folder, verify).manifest
    forms: dict[str, list[str]] = {}
    for layer, form in sorted(manifest.layers.items(), key=lambda pair: int(pair[0])):
        size = "one scale an output channel" if form.group_size == -1 else f"groups of {form.group_size}"
        kept = f", {', '.join(form.kept)} kept" if form.kept else ""
        forms.setdefault(f"{form.bits} bits, {size}{kept}", []).append(layer)
    text = manifest.calibration
    rows = _head("quantized", QuantizedManifest, folder, manifest.files, verify) | {
        "model": f"{manifest.model_type}, digest {manifest.model_digest}",
        "experts": f"{len(manifest.layers)} layers x {manifest.num_experts}, hidden {manifest.hidden_size}, inner "
        f"{manifest.moe_intermediate_size}, source {manifest.dtype}",
        "method": f"{manifest.method} by the {manifest.solver} solver; {manifest.quantized_linears} linears quantised, "
        f"{manifest.rounded_linears} of them rounded for want of tokens, {manifest.kept_linears} kept",
        "layers": [f"{form}: layers {', '.join(layers)}" for form, layers in forms.items()],
        "mean output error": round(manifest.mean_output_error, 6),
        "calibration": f"{text.tokens} tokens in {text.sequences} sequences from {text.source}",
        "settings": _settings(manifest.settings),
        "files": _file_rows(manifest.files),
    }
    return _of_files(rows, manifest.files)


def _profile(folder: Path, verify: bool) -> Facts:
    profile = Profile.open(folder, verify)
    manifest = profile.manifest
    domains = [
        f"{name}: {count} tokens in {manifest.sequences[name]} sequences" for name, count in manifest.domains.items()
    ]
    rows = _head("profile", ProfileManifest, folder, manifest.files, verify) | {
        "model": f"{manifest.model_type}, digest {manifest.model_digest}",
        "experts": f"{len(manifest.moe_layers)} layers x {manifest.num_experts}, top {manifest.top_k}",
        "domains": domains,
        "trace": f"{manifest.trace_tokens} tokens recorded one by one",
        "draft": _draft(manifest),
        "sensitivity": _sensitivity(profile),
        "probe": "none" if manifest.probe is None else f"{len(manifest.probe.rows)} variants on "
        f"{sum(manifest.probe.tokens.values())} tokens, {manifest.probe.problems} problems answered",
        "report": str(folder / "report.html") if (folder / "report.html").is_file() else "none",
        "settings": _settings(manifest.settings),
        "files": _file_rows(manifest.files),
    }  # fmt: skip
    return _of_files(rows, manifest.files)


def _draft(manifest: ProfileManifest) -> list[str] | str:
    draft = manifest.draft
    if draft is None:
        return "none"
    share = {name: "n/a" if value is None else f"{100 * value:.1f} %" for name, value in draft.agreement.items()}
    agreement = ", ".join(f"{name} {value}" for name, value in share.items())
    return [f"quantized artifact {draft.quantized_sha256}", f"routing agreement: {agreement}"]


def _sensitivity(profile: Profile) -> str:
    figures = profile.manifest.sensitivity
    if figures is None:
        return "none"
    found = profile.sensitivity()
    scores = {layer: found.experts_of(layer) for layer in profile.manifest.moe_layers}
    order = sorted(scores, key=lambda layer: (-scores[layer], layer))[:8]
    more = " ..." if len(scores) > len(order) else ""
    return (
        f"{len(figures.linears)} linears on {sum(figures.tokens.values())} predicted tokens; most sensitive layers "
        f"{', '.join(map(str, order))}{more}"
    )


def _pack(folder: Path, verify: bool) -> Facts:
    from runtime.artifacts.heat import hot_half

    pack = Pack.open(folder, verify)
    manifest, spec = pack.manifest, pack.spec
    draft = {f"{f.gate_up.bits} bits" if f.gate_up.bits else "kept" for f in manifest.draft_formats.values()}
    sizes = {
        side: sum(entry.size_bytes for name, entry in manifest.files.items() if name.startswith(f"{side}-"))
        for side in ("target", "draft")
    }
    heat = "not known (made without a profile)"
    if pack.heat is not None:
        heat = f"{len(hot_half(pack.heat))} of {spec.num_records} experts serve half of all uses"
    rows = _head("pack", PackManifest, folder, manifest.files, verify) | {
        "model": f"{manifest.model_type}, digest {manifest.model_digest}",
        "experts": f"{len(spec.moe_layers)} layers x {spec.num_experts}, top {spec.top_k}, hidden {spec.hidden_size}, "
        f"inner {spec.moe_intermediate_size}, {spec.dtype}",
        "target": f"{manifest.encoding}, {format_size(sizes['target'])} in {manifest.num_shards} shards, "
        f"{manifest.target_slot_bytes} bytes a slot",
        "draft": f"{', '.join(sorted(draft))}, {format_size(sizes['draft'])}, {manifest.draft_slot_bytes} bytes a slot",
        "heat": heat,
        "made from": [
            f"quantized artifact {manifest.quantized_sha256}",
            "no profile" if manifest.profile_sha256 is None else f"profile {manifest.profile_sha256}",
        ],
        "files": _file_rows(manifest.files),
    }  # fmt: skip
    return _of_files(rows, manifest.files)


def _model(folder: Path) -> Facts:
    from runtime.model.families import describe

    checkpoint = Checkpoint.open(folder)
    total = sum(info.end - info.start for info in checkpoint.tensors.values())
    spec = describe(checkpoint)
    experts = spec.num_records * spec.expert_parameters
    rows = {
        "kind": "model",
        "path": str(folder),
        "model": f"{spec.model_type}, digest {checkpoint.digest}",
        "size": f"{format_size(total)} in {len(checkpoint.tensors)} tensors",
        "experts": f"{len(spec.moe_layers)} of {spec.num_layers} layers x {spec.num_experts}, top {spec.top_k}, hidden "
        f"{spec.hidden_size}, inner {spec.moe_intermediate_size}, {spec.dtype}",
        "parameters": f"{experts} in routed experts",
        "next": f"moespeq quantize --model {folder}",
    }
    return Facts(rows, {"size_bytes": total, "num_tensors": len(checkpoint.tensors)})


def _deployment(path: Path) -> Facts:
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(
            expected=f"a folder or a YAML file at {path}",
            found="another file",
            mend="pass the folder that holds it, or a deployment profile",
        )
    settings = load_profile(str(path))
    make_settings(str(path), {})
    notes = [
        line.removeprefix("#").strip() for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#"
    ]
    rows = {
        "kind": "deployment profile",
        "path": str(path),
        "sha256": sha256_file(path),
        "settings": [_setting(name, value) for name, value in settings.items()],
        "notes": notes or "none",
        "goes with": f"moespeq run --config {path}",
    }
    return Facts(rows)


def _setting(name: str, value: Any) -> str:
    if name == "kernel_dispatch":
        return f"{name}: {len(value.entries)} layers measured"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{name} = {', '.join(f'{part} {number}' for part, number in asdict(value).items())}"
    return f"{name} = {value}"


def _companions(path: Path, facts: Facts, artifacts: Path) -> list[str]:
    """Other artifacts beside it or in the artifacts folder, and how they are related to it."""
    own = read_json(path / MANIFEST, "a manifest")
    digest, sha256 = own["model_digest"], facts.rows["manifest sha256"]
    sources = _sources(own)
    found = []
    for folder in dict.fromkeys(place / stage for place in (path.parent, artifacts) for stage in STAGES):
        if folder.resolve() == path.resolve() or not is_finished(folder):
            continue
        body = read_json(folder / MANIFEST, "a manifest")
        if not isinstance(body, dict):
            continue
        theirs = _sources(body)
        if sha256_file(folder / MANIFEST) in sources:
            relation = "it was made with this"
        elif sha256 in theirs:
            relation = "made with it"
        elif body.get("model_digest") == digest:
            relation = "of the same model"
        else:
            relation = "of another model: does not go with it"
        found.append(f"{folder}: {relation}")
    return found or ["no other artifact beside it"]


def _sources(manifest: dict[str, Any]) -> set[str]:
    """Checksums of the manifests of the artifacts that one was made with."""
    draft = manifest.get("draft")
    names = [manifest.get("quantized_sha256"), manifest.get("profile_sha256")]
    names.append(draft.get("quantized_sha256") if isinstance(draft, dict) else None)
    return {name for name in names if isinstance(name, str)}
