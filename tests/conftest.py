"""One thread for the arithmetic of tiny models, set before torch starts its own; in CI the same examples every time."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

gc.disable()  # until all is collected: what is imported meanwhile stays, and looking through it again costs a third

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-capability", metavar="8.0", help="GPU tests with the code and the shared memory of an older GPU"
    )


@pytest.fixture(scope="session", autouse=True)
def older_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """The GPU that `--gpu-capability` asks for."""
    asked: str | None = request.config.getoption("--gpu-capability")
    if asked is None:
        yield
        return
    from tests.older_gpu import as_older_gpu, capability_of  # which starts torch

    with as_older_gpu(capability_of(asked)):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Each worker begins with neighbouring tests, which share models, and in the end takes over some of another's."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
