"""Pages that name tests as proof name tests that are there, and every family that the code knows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from runtime.model.families import FAMILIES
from tests.tiny import KINDS, MORE, UNLISTED

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["models", "hard_cases", "security"])
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / f"{page}.md").read_text())
    assert len(named) >= 5
    for file, test in named:
        body = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in ast.walk(body) if isinstance(node, ast.FunctionDef)}
        assert not test or test in functions, f"{file}::{test}"


def test_every_family_is_on_the_page() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    for kind in {*FAMILIES, *KINDS, *MORE, *UNLISTED}:
        assert f"`{kind}`" in page, kind
