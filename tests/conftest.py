"""One thread for the arithmetic of tiny models, set before torch starts its own; in CI the same examples every time."""

from __future__ import annotations

import gc
import os

from hypothesis import settings

gc.disable()  # until all is collected: what is imported meanwhile stays, and looking through it again costs a third

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
