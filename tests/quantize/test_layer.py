"""A layer's experts in batches and on threads: the same tensors whoever solves them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moespeq_cli.quantize import layer
from moespeq_cli.quantize.layer import experts_at_once, working_bytes
from runtime.model import stream
from tests.quantize.conftest import Quantize
from tests.tiny import save_tiny


@pytest.mark.parametrize("kind", ["qwen2_moe", "gpt_oss"])
def test_batches_and_threads_change_nothing(
    kind: str, run: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All eight in one batch, one by one, and in batches of two on three threads."""
    folder = save_tiny(kind, tmp_path / "model", dtype=torch.bfloat16)
    together = run(folder, device="cpu")
    batches: list[list[int]] = []
    real = layer.LayerQuantizer._quantize_some

    def solve(self: layer.LayerQuantizer, *arguments: object) -> layer.LayerResult:
        batches.append(list(arguments[5]))  # type: ignore[call-overload]
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(layer.LayerQuantizer, "_quantize_some", solve)
    before = torch.get_num_threads()
    for threads, room, most in ((1, 1, 1), (3, 6, 2)):
        batches.clear()
        monkeypatch.setattr(layer, "experts_at_once", lambda *_, room=room: room)
        monkeypatch.setattr(stream, "set_threads", lambda *_, n=threads: torch.set_num_threads(n) or n)
        try:
            apart = run(folder, device="cpu")
        finally:
            torch.set_num_threads(before)
        assert sorted(expert for batch in batches for expert in batch) == sorted([*range(8)] * len(together.moe_layers))
        assert max(map(len, batches)) == most
        for name in together.checkpoint.tensors:
            first, second = together.checkpoint.read(name), apart.checkpoint.read(name)
            if name.endswith("qweight"):  # a tie may round the other way when sums are taken in another order
                assert (first != second).float().mean() < 0.01, name
            else:
                assert torch.equal(first, second), name


def test_a_whole_layer_fits_a_large_gpu_and_a_few_experts_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 experts of Qwen1.5-MoE on an H200 are one batch."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("H200", (), {"total_memory": 150 << 30}))
    assert experts_at_once(2048, 1408, working_bytes(torch.device("cuda"))) >= 60
    assert experts_at_once(2048, 1408, working_bytes(torch.device("cpu"))) == 6
