"""Reading what the routing profile says about experts that fire together."""

from __future__ import annotations

from pathlib import Path

import torch

from moespeq_cli.pack.striping import Routing
from runtime.artifacts.manifest import check_files, load_manifest, require_same_model
from runtime.artifacts.profile import ProfileManifest
from runtime.artifacts.safetensors_file import as_tensor, pread, read_header
from runtime.errors import ArtifactError
from runtime.model.families import MoeSpec

ROUTING = "routing.safetensors"
MEND = "make the profile artifact again with `moespeq profile`"


def load_routing(folder: Path, model_digest: str, spec: MoeSpec) -> Routing:
    """Co-activation and counts of a profile of this model, the domains added up.

    Raises:
        InputError: a profile of another model.
        ArtifactError: unfinished, damaged, or without these tensors.
    """
    manifest = load_manifest(folder, ProfileManifest)
    require_same_model("profile", folder, manifest.model_digest, model_digest)
    if ROUTING not in manifest.files:
        raise ArtifactError(expected=f"{ROUTING} among the files of {folder}", found="none of that name", mend=MEND)
    check_files(folder, {ROUTING: manifest.files[ROUTING]}, "profile", contents=True)
    layers, experts = len(spec.moe_layers), spec.num_experts
    path = folder / ROUTING
    infos = read_header(path, MEND)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in (("coactivation", (layers, experts, experts)), ("counts", (-1, layers, experts))):
        info = infos.get(name)
        fits = info is not None and info.dtype == "I64" and len(info.shape) == 3 and info.shape[1:] == shape[1:]
        if info is None or not fits or shape[0] not in (-1, info.shape[0]):
            found = f"{info.dtype} {list(info.shape)}" if info is not None else "none"
            raise ArtifactError(expected=f"{name} as I64 {list(shape)} in {path}", found=found, mend=MEND)
        tensors[name] = as_tensor(pread(path, info.start, info.end - info.start), info.dtype, info.shape)
    return Routing(tensors["coactivation"], tensors["counts"].sum(0))
