"""What the project promises about its own layout."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_cuda_folder_is_no_package() -> None:
    """A package named `cuda` would hide NVIDIA's namespace and break `import cupy`."""
    assert (ROOT / "cuda").is_dir()
    assert not list((ROOT / "cuda").rglob("__init__.py"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel installs, without what it requires."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("moespeq-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_wheel_brings_kernel_sources_and_profiles(installed: Path) -> None:
    sources = [path.relative_to(ROOT / "cuda") for path in (ROOT / "cuda").rglob("*.cu*")]
    assert any(path.suffix == ".cu" for path in sources) and any(path.suffix == ".cuh" for path in sources)
    for path in sources:
        assert (installed / "runtime" / "_cuda" / path).read_bytes() == (ROOT / "cuda" / path).read_bytes()
    assert list((installed / "runtime" / "_profiles").glob("*.yaml"))
    decoder = Path("runtime") / "artifacts" / "residual_decode.c"
    assert (installed / decoder).read_bytes() == (ROOT / decoder).read_bytes()
    assert not (installed / "cuda").exists() and not (installed / "tests").exists()


def test_installed_wheel_finds_its_kernel_sources(installed: Path, tmp_path: Path) -> None:
    code = "from runtime.kernels.compile import kernel_folder; print(kernel_folder())"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(installed / "runtime" / "_cuda"), done.stderr


def test_readme_test_command_is_what_ci_runs() -> None:
    """CI and the README must not drift apart."""
    command = "python -m pytest -n 2"
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_torch_range_keeps_the_cpu_wheel() -> None:
    """Above 2.13 the default torch wheel is a CUDA build of several gigabytes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert any(line.startswith("torch>=2.11,<2.14") for line in project["dependencies"])


def test_no_machine_path_or_registry_host_in_the_tree() -> None:
    """Files speak of the project alone."""
    words = ["/" + "root/", "pypi" + ".org", "files.python" + "hosted"]
    for folder in ("moespeq_cli", "runtime", "docs", "tests", "profiles", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".md", ".yaml", ".json", ".toml", ""):
                text = path.read_text(encoding="utf-8", errors="ignore")
                for word in words:
                    assert word not in text, f"{word} in {path}"
