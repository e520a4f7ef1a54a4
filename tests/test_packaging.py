"""What the project promises about its own layout."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_cuda_folder_is_no_package() -> None:
    """A package named `cuda` would hide NVIDIA's namespace and break `import cupy`."""
    assert (ROOT / "cuda").is_dir()
    assert not list((ROOT / "cuda").rglob("__init__.py"))


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
