"""Profiles of recorded routing alone, made up without a model."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

from runtime.artifacts.manifest import FileEntry, save_manifest
from runtime.artifacts.profile import ROUTING, DraftFigures, Profile, ProfileManifest

NUM_EXPERTS, TOP_K, LAYERS = 8, 2, (1, 2, 4)


def choices(tokens: int, generator: torch.Generator, favourite: int = 0) -> torch.Tensor:
    """int16 [tokens, layers, top_k]: choices that stay from token to token more often than chance, some liked more."""
    liking = torch.ones(NUM_EXPERTS)
    liking[favourite : favourite + 3] = 4
    rows = []
    last = torch.stack([torch.multinomial(liking, TOP_K, generator=generator) for _ in LAYERS])
    for _ in range(tokens):
        fresh = torch.stack([torch.multinomial(liking, TOP_K, generator=generator) for _ in LAYERS])
        last = torch.where(torch.rand(len(LAYERS), 1, generator=generator) < 0.5, last, fresh)
        rows.append(last)
    return torch.stack(rows).to(torch.int16)


def save_recorded(
    folder: Path, lengths: dict[str, list[int]], seed: int = 0, draft_noise: float | None = None
) -> Profile:
    """A finished profile with these sequence lengths by domain, in turn; the domains like different experts.

    Args:
        folder: to make.
        lengths: tokens of each sequence.
        seed: of the choices.
        draft_noise: the share of the draft's tokens that choose otherwise; None for no draft.
    """
    generator = torch.Generator().manual_seed(seed)
    names = sorted(lengths)
    order = [(n, i) for i in range(max(map(len, lengths.values()))) for n in names if i < len(lengths[n])]
    parts = [choices(lengths[name][place], generator, 3 * names.index(name)) for name, place in order]
    trace = torch.cat(parts) if parts else torch.zeros(0, len(LAYERS), TOP_K, dtype=torch.int16)
    counts = torch.zeros(len(names), len(LAYERS), NUM_EXPERTS, dtype=torch.int64)
    coactivation = torch.zeros(len(LAYERS), NUM_EXPERTS, NUM_EXPERTS, dtype=torch.int64)
    for (name, _), part in zip(order, parts, strict=True):
        for layer in range(len(LAYERS)):
            chosen = torch.zeros(len(part), NUM_EXPERTS, dtype=torch.int64).scatter_(1, part[:, layer].long(), 1)
            counts[names.index(name), layer] += chosen.sum(0)
            coactivation[layer] += chosen.T @ chosen
    layers, domains = len(LAYERS), len(names)
    starts = torch.tensor([0, *[len(part) for part in parts[:-1]]]).cumsum(0)
    tensors = {
        "counts": counts,
        "coactivation": coactivation,
        "reuse_histogram": torch.full((domains, layers, 1), min(1, len(trace))),
        "first_uses": torch.full((domains, layers), min(1, len(trace))),
        "reuse_mean": torch.ones(domains, layers, dtype=torch.float64),
        "kept_from_previous": torch.full((domains, layers), 0.5, dtype=torch.float64),
        "trace": trace,
        "trace_starts": starts[: len(parts)],
        "trace_domain": torch.tensor([names.index(name) for name, _ in order], dtype=torch.int64),
    }
    draft = None
    if draft_noise is not None:
        wrong = torch.rand(len(trace), 1, 1, generator=generator) < draft_noise
        tensors["draft_trace"] = torch.where(wrong, (trace + 3) % NUM_EXPERTS, trace).to(torch.int16)
        tensors["agreement"] = tensors["agreement_next"] = torch.full((domains, layers), 1 - draft_noise).double()
        shares = dict.fromkeys(names, 1 - draft_noise)
        draft = DraftFigures(
            "0" * 64, shares, shares, {n: (1 - draft_noise,) * layers for n in names}, shares, shares,
            {n: sum(lengths[n]) for n in names},
        )  # fmt: skip
    folder.mkdir(parents=True)
    (folder / ROUTING).write_bytes(safetensors.torch.save({n: t.clone() for n, t in tensors.items()}))
    manifest = ProfileManifest(
        model_digest="1" * 64,
        model_type="made_up",
        moe_layers=LAYERS,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        domains={name: sum(lengths[name]) for name in names},
        sequences={name: len(lengths[name]) for name in names},
        reuse_edges=(1, 2),
        trace_tokens=len(trace),
        settings={},
        files={ROUTING: FileEntry.of(folder / ROUTING)},
        draft=draft,
    )
    save_manifest(folder, manifest)
    return Profile.open(folder)
