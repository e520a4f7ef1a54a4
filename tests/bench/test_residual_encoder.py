"""Records made by tensor operations are those of the reference encoder, byte by byte."""

from __future__ import annotations

import pytest
import torch

from moespeq_cli.bench.kernel_residual import ExactExperts
from moespeq_cli.bench.synthetic.residual import ResidualEncoder
from runtime.errors import ShapeError
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import ExpertShape, WeightForm
from runtime.kernels.units import Codes
from tests.kernels.residual_cases import SHAPES, every_word, wild, with_exceptions


def encoded(experts: ExactExperts) -> list[torch.Tensor]:
    encoder = ResidualEncoder(experts.layout, torch.device("cpu"))
    return [
        encoder.encode(
            experts.gate_up[i],
            experts.down[i],
            Codes(experts.gate_up_codes.codes[i : i + 1], experts.gate_up_codes.scales[i : i + 1]),
            Codes(experts.down_codes.codes[i : i + 1], experts.down_codes.scales[i : i + 1]),
        )
        for i in range(len(experts.gate_up))
    ]


def same(experts: ExactExperts) -> bool:
    pairs = zip(encoded(experts), experts.records(), strict=True)
    return all(torch.equal(found, right) for found, right in pairs)


@pytest.mark.parametrize("name", [name for name, (shape, _) in SHAPES.items() if not shape.has_bias])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.7])
def test_bytes_are_those_of_the_reference(name: str, share: float) -> None:
    experts = ExactExperts.random(*SHAPES[name], 3, seed=5)
    assert same(wild(experts, share, seed=1))
    assert same(with_exceptions(experts, share, seed=2))


def test_every_word_under_every_code() -> None:
    assert same(every_word())


def test_a_short_last_group() -> None:
    assert same(ExactExperts.random(ExpertShape(1, 1, 264, 136), WeightForm("int4", -1), 2))


def test_biases_and_other_codes_are_refused() -> None:
    for shape, form in (
        (ExpertShape(2, 1, 64, 64, has_bias=True), WeightForm("int4", 32)),
        (ExpertShape(2, 1, 64, 64), WeightForm("int8", 32)),
    ):
        with pytest.raises(ShapeError, match="no biases"):
            ResidualEncoder(SlotLayout(shape, form), torch.device("cpu"))
