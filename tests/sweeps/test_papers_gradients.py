"""The papers' experiments train with the papers' gradients."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fl_bn.sweep.file import read

FILES = sorted((Path(__file__).parents[2] / "experiments" / "definitions").glob("0*.toml"))


RUNS = [file for file in FILES if "program" not in tomllib.loads(file.read_text())["experiment"]]


@pytest.mark.slow
@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_no_experiment_of_a_paper_centres_gradients(file: Path) -> None:
    """Not even in rounds with frozen statistics."""
    for variant in ("", *tomllib.loads(file.read_text()).get("variants", {})):
        cells = read(file, variant).cells(Path("none"))
        federated = [(cell.config, cell.config.build_method()) for cell in cells if not cell.centralised]
        centred = {
            config.name
            for config, method in federated
            if any(method.centres(method.phase(round, config.rounds)) for round in (1, config.rounds))
        }
        assert not centred, variant or "as it is"
