"""Table 17 of FedBN: what a new client gets of FedBN, and of methods that share all of BatchNorm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.definitions.programs import new_clients
from experiments.definitions.programs.new_clients import CLIENTS, OWN, WAYS, measured, newcomers, plan
from fl_bn.flower import run_in_process
from fl_bn.sweep.cells import Cell

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cell]:
    """One short run of each method on two made domains."""
    found = {}
    for cell in plan(tmp_path_factory.mktemp("runs"), "small", ""):
        cell = Cell(replace(cell.config, rounds=2, clients=2, shifts="none,invert"), cell.axes)
        run_in_process(cell.config.to_mapping())
        found[str(cell.axes["method"])] = cell
    return found


def test_fedbn_s_new_client_has_its_own_statistics_and_others_what_is_shared(cells: dict[str, Cell]) -> None:
    """FedBN's two rows are one, since it has no other. Control: FedAvg's differ."""
    fedbn, fedavg = (measured(cells[name]) for name in ("FedBN", "FedAvg"))
    assert list(fedbn) == list(WAYS)
    for client in CLIENTS:
        assert fedbn[client] == fedbn[f"{client}{OWN}"]
    assert any(fedavg[client] != fedavg[f"{client}{OWN}"] for client in CLIENTS)


def test_the_new_clients_are_the_same_for_all_runs_and_have_other_digits(cells: dict[str, Cell]) -> None:
    one, other = (newcomers(replace(cell.config, seed=seed)) for seed, cell in enumerate(list(cells.values())[:2]))
    assert [client.name for client in one] == list(CLIENTS)
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine.x, theirs.x)
        assert mine.x.shape == (new_clients.SAMPLES, 3, 16, 16)
        assert len(mine.test) == 3 * 360  # the digits as they are, and under each change
    assert not torch.equal(one[0].x, one[1].x)


def test_the_study_writes_its_table(cells: dict[str, Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_clients, "plan", lambda folder, variant, data: list(cells.values()))
    monkeypatch.setattr(new_clients, "run_cells", lambda cells, jobs, progress: {})
    rows = new_clients.run(tmp_path)
    assert len(rows) == len(cells) * len(WAYS)
    assert (tmp_path / "new_clients.csv").read_text().startswith("method,seed,client,accuracy\nFedBN,0,Morpho-global,")
    assert (tmp_path / "new_clients.png").stat().st_size > 10_000
    monkeypatch.setattr(new_clients, "run_cells", lambda cells, jobs, progress: {"FedBN-seed0": "no room"})
    with pytest.raises(RuntimeError, match="1 of 3 runs failed: FedBN-seed0: no room"):
        new_clients.run(tmp_path)
