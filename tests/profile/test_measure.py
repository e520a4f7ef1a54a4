"""Routing of real layers: the library's own choices, domains apart, a draft that is equal or noisy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from moespeq_cli.profile.measure import Measurement, TextSequence, in_turn, measure
from runtime.artifacts.checkpoint import Checkpoint
from runtime.model.families import LayerExperts, MoeSpec, describe, read_layer
from runtime.model.stream import LayerStream
from tests import tiny


class SourceExperts:
    """The source's own experts as a draft, with noise in the layers named."""

    def __init__(self, checkpoint: Checkpoint, spec: MoeSpec, noise: float = 0.0, layers: tuple[int, ...] = ()) -> None:
        self.checkpoint, self.spec, self.noise, self.layers = checkpoint, spec, noise, layers

    def read_layer(self, layer_id: int, dtype: torch.dtype, device: torch.device) -> LayerExperts:
        experts = read_layer(self.checkpoint, self.spec, layer_id)
        if layer_id in self.layers:
            generator = torch.Generator().manual_seed(layer_id)
            down = experts.down_proj.float()
            experts.down_proj = down + self.noise * torch.randn(down.shape, generator=generator)
        return experts


def texts(*lengths: int, domain: str = "a", seed: int = 0) -> list[TextSequence]:
    generator = torch.Generator().manual_seed(seed)
    return [TextSequence(domain, torch.randint(0, 250, (length,), generator=generator)) for length in lengths]


def run(folder: Path, sequences: list[TextSequence], draft: Any = None, **options: Any) -> Measurement:
    checkpoint = Checkpoint.open(folder)
    return measure(LayerStream(checkpoint, describe(checkpoint)), sequences, draft, **options)


def test_ten_known_tokens_count_top_k_times_in_every_layer(model: Path) -> None:
    """H18."""
    tensors = run(model, [TextSequence("known", torch.tensor(list(b"abcabcabca")))]).tensors
    assert tensors["counts"].sum(-1).tolist() == [[20, 20, 20]]
    assert tensors["trace"].shape == (10, 3, 2)
    for layer in range(3):
        counted = torch.bincount(tensors["trace"][:, layer].flatten().long(), minlength=8)
        assert torch.equal(counted, tensors["counts"][0, layer])


def test_domains_do_not_mix_and_company_does_not_matter(model: Path) -> None:
    """Each domain's figures are those of a profile of it alone; sequences of other lengths change nothing."""
    first, second = texts(5, 30, domain="first"), texts(1, 17, 40, domain="second", seed=1)
    both = run(model, in_turn([*second, *first])).tensors
    for place, alone in enumerate((first, second)):
        single = run(model, alone).tensors
        for name in ("counts", "first_uses", "reuse_mean", "kept_from_previous"):
            assert torch.equal(both[name][place], single[name][0]), name
        buckets = single["reuse_histogram"].shape[-1]
        assert torch.equal(both["reuse_histogram"][place, :, :buckets], single["reuse_histogram"][0])


def test_in_turn_alternates_domains_and_loses_none() -> None:
    mixed = in_turn([*texts(1, 2, 3), *texts(4, domain="b"), *texts(5, 6, domain="c")])
    assert [s.domain for s in mixed] == ["a", "b", "c", "a", "c", "a"]
    assert sorted(len(s.input_ids) for s in mixed) == [1, 2, 3, 4, 5, 6]


def test_an_equal_draft_agrees_everywhere(model: Path) -> None:
    checkpoint = Checkpoint.open(model)
    measured = run(model, texts(20, 9), SourceExperts(checkpoint, describe(checkpoint)))
    assert (measured.tensors["agreement"] == 1).all()
    assert (measured.tensors["agreement_next"][:, :-1] == 1).all()
    assert measured.tensors["agreement_next"][:, -1].isnan().all()
    assert torch.equal(measured.tensors["draft_trace"], measured.tensors["trace"])
    assert measured.draft is not None
    assert measured.draft.agreement == measured.draft.greedy == {"a": 1.0}
    assert measured.draft.overlap["a"] == pytest.approx(1.0, abs=1e-5)
    assert measured.draft.compared_tokens == {"a": 29}


def test_noise_shows_behind_the_layer_that_has_it(model: Path) -> None:
    """Layer 1 alone is noisy: routing in layers 0 and 1 is untouched, in layer 2 it is not; both readings say so."""
    checkpoint = Checkpoint.open(model)
    draft = SourceExperts(checkpoint, describe(checkpoint), noise=1.0, layers=(1,))
    measured = run(model, texts(40, 40), draft)
    agreement, following = measured.tensors["agreement"][0].tolist(), measured.tensors["agreement_next"][0].tolist()
    assert agreement[:2] == [1.0, 1.0] and 0 < agreement[2] < 0.95
    assert following[0] == 1.0 and following[1] < 0.95 and math.isnan(following[2])
    assert measured.draft is not None and (measured.draft.greedy["a"] or 0) < 1
    little = run(model, texts(40, 40), SourceExperts(checkpoint, describe(checkpoint), noise=0.05, layers=(1,)))
    assert agreement[2] < float(little.tensors["agreement"][0, 2]) <= 1


def test_true_layer_numbers_where_layers_are_dense(tmp_path: Path) -> None:
    """H08: a dense layer between the ones with experts; the axis has the latter only, and the draft passes through."""
    settings = {"num_hidden_layers": 4, "mlp_only_layers": [0], "decoder_sparse_step": 2}
    tiny.save_tiny("qwen2_moe", tmp_path, **settings)
    checkpoint = Checkpoint.open(tmp_path)
    spec = describe(checkpoint)
    assert spec.moe_layers == (1, 3)
    measured = run(tmp_path, texts(40, 12), SourceExperts(checkpoint, spec, noise=1.0, layers=(1,)))
    assert measured.tensors["counts"].sum(-1).tolist() == [[104, 104]]
    assert float(measured.tensors["agreement"][0, 0]) == 1 > float(measured.tensors["agreement"][0, 1])
    assert float(measured.tensors["agreement_next"][0, 0]) < 1
