"""Both ways with GPTQModel itself, in a process of its own: what it reads of our folders, what we read of its.

GPTQModel pins releases of other packages, so it lives in an environment apart (extra `gptqmodel`); name its Python in
MOESPEQ_GPTQMODEL. On a machine without it these tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.gptq_import import open_quantized
from runtime.artifacts.quantized import Quantized, QuantizedLinear, linear_name
from runtime.errors import ArtifactError
from runtime.model.families import PROJECTIONS, describe
from tests.pack.fixtures import save_quantized
from tests.tiny import KINDS, MORE, UNLISTED, save_tiny

PYTHON = os.environ.get("MOESPEQ_GPTQMODEL") or (sys.executable if importlib.util.find_spec("gptqmodel") else "")
LEAVES_EXPERTS = ("granitemoe", "granitemoeshared", "minimax_m2", "exaone_moe", "afmoe")
"""Families whose experts GPTQModel 7.6 neither quantises nor loads quantised."""
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs GPTQModel: name its Python in MOESPEQ_GPTQMODEL"),
    pytest.mark.timeout(900),
]


def put_rows_in_turn(weights: dict[str, torch.Tensor]) -> None:
    """GPTQModel calls the first half of the alternating gate and up rows gate_proj."""
    for gate in [name for name in weights if name.endswith("gate_proj")]:
        up = gate.removesuffix("gate_proj") + "up_proj"
        rows = torch.cat([weights[gate], weights[up]])
        weights[gate], weights[up] = rows[0::2], rows[1::2]


def run(place: Path, script: str, *arguments: str) -> None:
    """Run one of the scripts beside this file in `place`, where it leaves its logs."""
    path = Path(__file__).with_name(script)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([PYTHON, str(path), *arguments], capture_output=True, text=True, cwd=place, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_it_reads_our_experts_bit_for_bit(tmp_path: Path) -> None:
    """And leaves alone what we did not quantise, the router's weights among it."""
    kinds = [*KINDS, *MORE, *UNLISTED]
    ours: dict[str, Quantized] = {}
    for kind in kinds:
        model = save_tiny(kind, tmp_path / kind / "model", dtype=torch.bfloat16)
        ours[kind] = Quantized.open(save_quantized(model, tmp_path / kind / "quantized"))
    run(tmp_path, "gptqmodel_reader.py", str(tmp_path), *(f"{kind}={ours[kind].folder}" for kind in kinds))
    report = json.loads((tmp_path / "report.json").read_text())
    read = {}
    for kind, quantized in ours.items():
        assert "error" not in report[kind], (kind, report[kind])
        assert (report[kind]["others"] == [] and report[kind]["unused"] == []) or kind in LEAVES_EXPERTS, report[kind]
        theirs = load_file(tmp_path / f"{kind}.safetensors")
        read[kind] = len(theirs)
        for name, weight in theirs.items():
            layer, expert, projection = name.split(".")[2], name.split(".")[-2], name.split(".")[-1]
            linear = quantized.linear(int(layer), int(expert), projection)
            assert isinstance(linear, QuantizedLinear)
            assert torch.equal(linear.dequantized(torch.float16), weight), (kind, name)
    assert read == {kind: 0 if kind in LEAVES_EXPERTS else 48 for kind in kinds}


@pytest.mark.parametrize("form", ["plain", "dynamic", "desc_act"])
def test_we_read_its_experts_bit_for_bit(form: str, tmp_path: Path) -> None:
    """Attention quantised too, a layer at 8 bits by a rule; activation order is refused by name."""
    kinds = ["qwen2_moe", "mixtral", "deepseek_v2", "gpt_oss"] if form == "plain" else ["qwen2_moe"]
    models = {kind: save_tiny(kind, tmp_path / kind, dtype=torch.bfloat16) for kind in kinds}
    run(
        tmp_path,
        "gptqmodel_writer.py",
        str(tmp_path / "made"),
        form,
        *(f"{kind}={folder}" for kind, folder in models.items()),
    )
    made = {kind: tmp_path / "made" / kind for kind in kinds}
    if form == "desc_act":
        checkpoint = Checkpoint.open(models["qwen2_moe"])
        with pytest.raises(ArtifactError, match=r"g_idx in channel order"):
            open_quantized(made["qwen2_moe"], checkpoint, describe(checkpoint))
        return
    run(tmp_path, "gptqmodel_reader.py", str(tmp_path), *(f"{kind}={folder}" for kind, folder in made.items()))
    for kind in kinds:
        checkpoint = Checkpoint.open(models[kind])
        spec = describe(checkpoint)
        quantized = open_quantized(made[kind], checkpoint, spec)
        if form == "dynamic":
            assert quantized.manifest.layers["1"].bits == 8
        theirs = load_file(tmp_path / f"{kind}.safetensors")
        assert len(theirs) == 3 * spec.num_records
        if kind == "gpt_oss":
            put_rows_in_turn(theirs)
        for layer_id, expert_id in spec.expert_keys():
            for projection in PROJECTIONS:
                linear = quantized.linear(layer_id, expert_id, projection)
                weight = theirs[linear_name(layer_id, expert_id, projection)]
                assert torch.equal(linear.dequantized(torch.float16), weight), (kind, layer_id, expert_id)
