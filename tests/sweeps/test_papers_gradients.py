"""The papers' experiments train with the papers' gradients."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fl_bn.sweep.file import read

FILES = sorted((Path(__file__).parents[2] / "fl_bn" / "experiments").glob("0*.toml"))


RUNS = [file for file in FILES if "program" not in tomllib.loads(file.read_text())["experiment"]]


@pytest.mark.slow
@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_no_experiment_of_a_paper_centres_gradients(file: Path) -> None:
    for variant in ("", *tomllib.loads(file.read_text()).get("variants", {})):
        cells = read(file, variant).cells(Path("none"))
        centred = {cell.config.name for cell in cells if not cell.centralised and cell.config.build_method().centre}
        assert not centred, variant or "as it is"
