"""A fixture with the experiment of ``evidence_runs``."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.catalogue import Experiment
from experiments.claims import VARIANT
from tests.sweeps.evidence_runs import DEFINITION, register


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    file = tmp_path / "defined" / "X-1.toml"
    file.parent.mkdir()
    file.write_text(DEFINITION)
    made = Experiment("X-1", file, "Nobody's", "Two methods", (VARIANT, "cause"))
    register(made)
    return made
