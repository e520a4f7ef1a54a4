"""docs/format.md, the page another program would be written from, names all that a pack holds."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from runtime.artifacts.encodings import ENCODINGS
from runtime.artifacts.pack import DENSE, MODEL_FOLDER, RECORDS, PackManifest
from runtime.artifacts.record import DRAFT_LAYOUT, RecordLayout, TensorField
from runtime.artifacts.record_index import RecordEntry
from runtime.model.families import MoeSpec

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.mark.parametrize("kind", [PackManifest, RecordEntry, RecordLayout, TensorField, MoeSpec])
def test_page_names_every_field(kind: type) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [field.name for field in fields(kind) if f"`{field.name}`" not in text] == []


def test_page_names_files_and_encodings() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in (DENSE, RECORDS, f"{MODEL_FOLDER}/", DRAFT_LAYOUT, *ENCODINGS):
        assert name in text
