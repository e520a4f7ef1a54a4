"""The table of measured backends: what it finds, and what is no such table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from runtime.config import load_profile
from runtime.errors import InputError
from runtime.kernels.shape import ExpertShape, WeightForm
from runtime.kernels.tuning import DispatchEntry, DispatchTable, TokenRange

ENTRY = {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 8, "top_k": 2, "form": "int4"}
LAST = {"up_to_tokens": None, "backend": "gemm"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("fused", "a list as"),
        ([3], "hidden_size, moe_intermediate_size"),
        ([ENTRY], "ranges"),
        ([ENTRY | {"ranges": []}], "a last range"),
        ([ENTRY | {"ranges": [LAST | {"up_to_tokens": 64}]}], "a last range"),
        ([ENTRY | {"ranges": [LAST, LAST]}], "an end for every range"),
        ([ENTRY | {"ranges": [LAST | {"up_to_tokens": 64}, LAST | {"up_to_tokens": 64}, LAST]}], "ascend"),
        ([ENTRY | {"ranges": [LAST | {"up_to_tokens": 8}, LAST]}], "one backend up to 16 tokens"),
        ([ENTRY | {"ranges": [{"up_to_tokens": None, "backend": "magic"}]}], "backends of"),
        ([ENTRY | {"ranges": [LAST], "form": "int3"}], "a form of"),
        ([ENTRY | {"ranges": [LAST], "top_k": "2"}], "top_k as int"),
        ([ENTRY | {"ranges": [LAST], "group_size": 2}], "group_size"),
        ([ENTRY | {"ranges": [LAST]}, ENTRY | {"ranges": [LAST]}], "each layer and form once"),
    ],
)
def test_impossible_tables_are_refused(tmp_path: Path, body: object, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({"kernel_dispatch": body}))
    with pytest.raises(InputError, match=message):
        load_profile(str(path))


def test_layers_are_found_by_geometry_and_form() -> None:
    ranges = (TokenRange(64, "fused"), TokenRange(None, "gemm"))
    table = DispatchTable((DispatchEntry(64, 96, 8, 2, "int4", ranges),))
    entry = table.find(ExpertShape(8, 2, 64, 96), WeightForm("int4", 32))
    assert entry is not None
    assert [entry.backend(count) for count in (1, 16, 64, 65, 10**6)] == ["fused"] * 3 + ["gemm"] * 2
    assert table.find(ExpertShape(8, 2, 64, 96), WeightForm("int8", -1)) is None
    assert table.find(ExpertShape(8, 1, 64, 96), WeightForm("int4", 32)) is None
    assert DispatchTable.from_list(table.to_list(), "here") == table


def test_settings_need_no_torch() -> None:
    """Reading a profile is part of every command's start."""
    code = "import sys, runtime.kernels.tuning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
