"""Errors between processes."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from runtime.errors import (
    ArtifactError,
    InputError,
    KernelError,
    MoespeqError,
    PlanError,
    ShapeError,
    StorageError,
    brief,
)

FAMILY = (MoespeqError, ArtifactError, InputError, KernelError, PlanError, ShapeError, StorageError)


def _refuse(values: dict[str, str]) -> None:
    raise ShapeError(**values)


@pytest.mark.parametrize("kind", FAMILY)
def test_an_error_survives_pickling(kind: type[MoespeqError]) -> None:
    error = kind(expected="1 row", found="[2] rows", mend="pack again")
    error.add_note("in layer 3")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind and str(again) == str(error) == "expected 1 row; found [2] rows"
        assert (again.expected, again.found, again.mend) == ("1 row", "[2] rows", "pack again")
        assert again.__notes__ == ["in layer 3"]


def test_the_family_is_whole() -> None:
    assert {MoespeqError, *MoespeqError.__subclasses__()} == set(FAMILY)


def test_an_error_leaves_a_worker_process() -> None:
    """An error that cannot be unpickled breaks the pool, and its message is lost."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        future = pool.submit(_refuse, {"expected": "1", "found": "2", "mend": "3"})
        with pytest.raises(ShapeError, match="expected 1; found 2") as refusal:
            future.result()
    assert refusal.value.mend == "3"


def test_what_another_program_raised_is_told_in_one_line() -> None:
    assert brief(ValueError("no such\n\n  kind")) == "ValueError: no such kind"
    assert brief(KeyError("rope")) == "KeyError: 'rope'" and brief(OSError()) == "OSError:"
    long = brief(ValueError("word " * 200))
    assert len(long) <= 300 and long.endswith("word ...")
