"""Names and numbers of layers to measure."""

from __future__ import annotations

import pytest

from moespeq_cli.bench.geometry import DEFAULT, KNOWN, parse_geometries, parse_geometry
from runtime.errors import MoespeqError
from runtime.kernels.shape import Activation, ExpertShape


def test_names_are_the_models_numbers() -> None:
    assert parse_geometry("qwen1.5-moe").shape == ExpertShape(60, 4, 2048, 1408)
    assert parse_geometry("gpt-oss-20b").shape == ExpertShape(32, 4, 2880, 2880, Activation.clamped, True)
    assert parse_geometry("mixtral-8x7b").label == "8, 2, 4096 x 14336"
    assert parse_geometry("gpt-oss-20b").label == "32, 4, 2880 x 2880, clamped, biases"


def test_any_geometry_as_numbers() -> None:
    assert parse_geometry("60:4:2048x1408").shape == KNOWN["qwen1.5-moe"].shape
    assert parse_geometry("257:9:512x1000:bias:gelu_tanh").shape == ExpertShape(
        257, 9, 512, 1000, Activation.gelu_tanh, True
    )


def test_lists() -> None:
    assert [geometry.name for geometry in parse_geometries(None)] == list(DEFAULT)
    assert [geometry.name for geometry in parse_geometries(["olmoe", "all", "3:1:64x8"])] == [
        "olmoe", *[name for name in KNOWN if name != "olmoe"], "3:1:64x8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", "gpt5", "60:4:2048", "60:4:2048x1408:relu", "60:4:2048x1408:silu:gelu", "4:5:64x64", "0:0:64x64", "4:2:60x64"],
)
def test_impossible_geometries_are_refused(text: str) -> None:
    with pytest.raises(MoespeqError) as refusal:
        parse_geometry(text)
    assert refusal.value.mend
