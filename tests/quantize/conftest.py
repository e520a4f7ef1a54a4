from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moespeq_cli.quantize.build import quantize
from moespeq_cli.quantize.plan import QuantizeOptions
from runtime.artifacts.quantized import Quantized
from tests.tiny import save_tiny

torch.set_num_threads(1)

LINES = [
    '{"domain": "prose", "text": "The ferry left the quay a little after six, and nobody on deck spoke."}',
    '{"domain": "prose", "text": "Rain had come over the hills in the night and the road was soft."}',
    '{"domain": "code", "text": "def area(width, height):\\n    return width * height\\n"}',
    '{"domain": "code", "text": "for name in sorted(names):\\n    print(name.title())\\n"}',
    '{"domain": "maths", "text": "Question: 3 boxes of 12 pens, 5 given away?\\nAnswer: 36 - 5 = 31\\n#### 31"}',
]
Quantize = Callable[..., Quantized]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few calibration lines of three domains."""
    path = tmp_path_factory.mktemp("text") / "calibration.jsonl"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BF16 model of two layers of eight experts, with a shared expert."""
    return save_tiny("qwen2_moe", tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


@pytest.fixture
def run(text: Path, tmp_path: Path) -> Quantize:
    """Quantise a model into a new folder with the calibration lines, and open the result with checksums."""
    made = 0

    def run(model: Path, **options: Any) -> Quantized:
        nonlocal made
        made += 1
        settings: dict[str, Any] = {"out": tmp_path / f"quantized-{made}", "data": text, "seq_len": 48, "min_tokens": 4}
        settings |= options
        quantize(QuantizeOptions(model=str(model), **settings))
        return Quantized.open(settings["out"], verify=True)

    return run
