from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.families.cases import Case, make_case

torch.set_num_threads(1)

CaseOf = Callable[[str], Case]


@pytest.fixture(scope="package")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> CaseOf:
    """Cases by name, each made once."""
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            made[name] = make_case(name, tmp_path_factory.mktemp(name.replace(" ", "-")))
        return made[name]

    return case
