"""Which encoding a pack gets where none is asked for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moespeq_cli.pack import encoding
from runtime.artifacts.record import DraftFormat, LinearFormat
from runtime.errors import InputError
from runtime.kernels.catalog import H200
from runtime.model.families import MoeSpec

SPEC = MoeSpec("mixtral", 2, (0, 1), 8, 2, 128, 256, "BF16", False, 0)
INT4 = DraftFormat(LinearFormat(4, 128), LinearFormat(4, 128))
INT8 = DraftFormat(LinearFormat(8, 128), LinearFormat(8, 256))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine had an H200 and CuPy."""
    monkeypatch.setattr(encoding, "usable_gpu", lambda: H200)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_computes_from_residual_records_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert encoding.choose("auto", SPEC, {0: INT4, 1: INT4}).name == "residual"
    assert encoding.choose("raw", SPEC, {0: INT4, 1: INT4}).name == "raw"
    assert encoding.choose("auto", SPEC, {0: INT4, 1: INT8}).name == "raw", "a run on a GPU refuses such a mixture"
    assert encoding.choose("auto", dataclasses.replace(SPEC, dtype="F16"), {0: INT4, 1: INT4}).name == "raw"
    monkeypatch.setattr(encoding, "usable_gpu", lambda: dataclasses.replace(H200, capability=(8, 6)))
    assert encoding.choose("auto", SPEC, {0: INT4, 1: INT4}).name == "raw"


def test_a_machine_without_a_gpu_gets_raw_records() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert encoding.choose("auto", SPEC, {0: INT4}).name == "raw"
    assert encoding.choose("residual", SPEC, {0: INT8}).name == "residual"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InputError, match="auto, raw, residual"):
        encoding.require_known("zip")
