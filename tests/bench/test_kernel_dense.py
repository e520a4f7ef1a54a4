"""The benchmark of a pass's dense steps measures what it checked, and catches a wrong step; no GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moespeq_cli.bench import kernel_dense
from moespeq_cli.bench.geometry import Geometry, parse_geometry
from moespeq_cli.bench.kernel_candidate import Call
from moespeq_cli.bench.kernel_time import Machine, Times
from moespeq_cli.bench.synthetic.models import make_config
from runtime.errors import InputError, KernelError
from runtime.kernels.rows_reference import TorchRows

MACHINE = Machine(4000.0, 4000.0, 700.0, 1 << 16)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of the same parts, a hundredth of the size, and no clock."""

    def config(name: str) -> object:
        made = make_config(name)
        made.hidden_size, made.vocab_size, made.num_attention_heads, made.num_key_value_heads = 64, 96, 4, 2
        for size in ("shared_expert_intermediate_size", "moe_intermediate_size"):
            if hasattr(made, size):
                setattr(made, size, 48)
        return made

    def replay(calls: Sequence[Call]) -> Times:
        for call in calls[:2]:
            call()
        return Times.of([1.0, 2.0, 3.0], len(calls))

    monkeypatch.setattr(kernel_dense, "make_config", config)
    monkeypatch.setattr(kernel_dense, "replay", replay)
    monkeypatch.setattr(kernel_dense, "KEYS", (16, 40))


def geometries(*names: str) -> list[Geometry]:
    return [parse_geometry(name) for name in names]


def test_every_step_of_every_model_has_a_row() -> None:
    done: list[int] = []
    results = kernel_dense.measure_dense(
        geometries("qwen1.5-moe", "deepseek-v2-lite", "olmoe", "mixtral-8x7b"),
        TorchRows(),
        MACHINE,
        lambda: done.append(1),
        "cpu",
    )
    assert [result["geometry"] for result in results] == ["qwen1.5-moe", "deepseek-v2-lite", "mixtral-8x7b"] and len(
        done
    ) == 3
    steps = {result["geometry"]: [row["step"] for row in result["rows"] if row["rows"] == 8] for result in results}
    assert len(steps["qwen1.5-moe"]) == 10 and "shared gate and up" in steps["deepseek-v2-lite"]
    assert not any("attention" in step for step in steps["deepseek-v2-lite"])
    assert not any("shared" in step for step in steps["mixtral-8x7b"])
    text = kernel_dense.dense_text(results)
    assert text.count("attention, 40 keys") == 4 and "nan" not in text


def test_a_wrong_step_is_not_timed() -> None:
    class Wrong(TorchRows):
        def swiglu(self, weight: Tensor, x: Tensor) -> Tensor:
            return super().swiglu(weight.flip(0), x)

    with pytest.raises(KernelError, match="shared gate and up"):
        kernel_dense.measure_dense(geometries("qwen1.5-moe"), Wrong(), MACHINE, lambda: None, "cpu")

    class Empty(TorchRows):
        def norm(self, x: Tensor, *_: object) -> Tensor:  # type: ignore[override]
            return torch.full_like(x, float("nan"))

    with pytest.raises(KernelError, match="norm"):
        kernel_dense.measure_dense(geometries("qwen1.5-moe"), Empty(), MACHINE, lambda: None, "cpu")


def test_asks_for_a_whole_model() -> None:
    with pytest.raises(InputError, match="deepseek-v2-lite"):
        kernel_dense.measure_dense(geometries("olmoe"), TorchRows(), MACHINE, lambda: None, "cpu")
