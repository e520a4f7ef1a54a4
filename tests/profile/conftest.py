from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.pack.fixtures import save_quantized
from tests.tiny import save_tiny

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of eight experts, top-2, in BF16."""
    folder = tmp_path_factory.mktemp("model")
    return save_tiny("qwen2_moe", folder / "qwen2_moe", dtype=torch.bfloat16, num_hidden_layers=3)


@pytest.fixture(scope="session")
def quantized(model: Path) -> Path:
    """That model's experts by round-to-nearest."""
    return save_quantized(model, model.parent / "quantized")
