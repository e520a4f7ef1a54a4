"""What the routing profile says about experts that fire together."""

from __future__ import annotations

from pathlib import Path

from moespeq_cli.pack.striping import Routing
from runtime.artifacts.manifest import require_same_model
from runtime.artifacts.profile import Profile


def load_routing(folder: Path, model_digest: str) -> Routing:
    """Co-activation, counts and heat of a profile of this model, the domains added up.

    Raises:
        InputError: a profile of another model.
        ArtifactError: unfinished or damaged.
    """
    profile = Profile.open(folder, verify=True)
    require_same_model("profile", folder, profile.manifest.model_digest, model_digest)
    return Routing(profile.tensors["coactivation"], profile.tensors["counts"].sum(0), profile.heat())
