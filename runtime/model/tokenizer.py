"""The tokenizer that belongs to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.errors import InputError, brief


def load_tokenizer(folder: Path) -> Any:
    """The library's tokenizer, from a model's folder alone.

    Raises:
        InputError: the folder has none, or one that transformers cannot read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise InputError(
            expected=f"a tokenizer in {folder}",
            found=brief(error),
            mend="copy tokenizer.json and tokenizer_config.json into the model's folder",
        ) from error
