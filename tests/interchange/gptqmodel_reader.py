"""Run by a Python that has GPTQModel: open quantized folders with it and write what it makes of their experts.

    python gptqmodel_reader.py RESULT_FOLDER NAME=FOLDER ...

Writes RESULT_FOLDER/NAME.safetensors with each expert linear dequantised, float16 [out, in], under the linear's name,
and RESULT_FOLDER/report.json with, for each name, the linears found, those outside the experts, or the error. It knows
nothing of moespeq: what it reads is what anybody reads.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its default fails on two cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def read(folder: str, result: Path) -> dict[str, Any]:
    """One folder: dequantise every quantised linear of an expert; name the tensors on disk that no module has."""
    import torch
    from gptqmodel import BACKEND, GPTQModel
    from safetensors.torch import save_file

    model = GPTQModel.load(folder, device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model
    linears: dict[str, torch.Tensor] = {}
    others: list[str] = []
    for name, module in model.named_modules():
        if not hasattr(module, "qweight"):
            continue
        if ".experts." not in name:
            others.append(name)
            continue
        weight = module.dequantize_weight()
        assert weight.dtype == torch.float16, weight.dtype
        linears[name] = weight.t().contiguous().clone()
    save_file(linears, result)
    index = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
    inside = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    unused = sorted(set(index) - inside)
    return {"linears": len(linears), "others": others, "unused": unused[:20], "class": type(model).__name__}


def main() -> None:
    """Read every folder, one failure not stopping the others."""
    target = Path(sys.argv[1])
    report: dict[str, Any] = {}
    for argument in sys.argv[2:]:
        name, folder = argument.split("=", 1)
        try:
            report[name] = read(folder, target / f"{name}.safetensors")
        except Exception as error:
            traceback.print_exc()
            report[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        (target / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
