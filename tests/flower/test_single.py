"""What stays at home: under SingleSet, everything; of BatchNorm, unless the run says that its average is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fl_bn.flower import run_in_process
from fl_bn.methods import METHODS
from tests.in_process import Samples, arrays_of, run
from tests.listed import listed
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]
SINGLE = METHODS["single"]()


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))


def start() -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in seeded_network("cnn").state_dict().items()}


def test_a_client_without_a_round_stays_where_it_was(clients: list[Samples]) -> None:
    ran = run(SINGLE, clients, 3, policy={"fraction": 0.4})
    rounds = [sum(c.client == client for record in ran.records for c in record.accepted) for client in range(3)]
    assert sorted(rounds)[0] == 0
    assert sum(rounds) == 3
    for state, trained in zip(ran.grid.states(), rounds, strict=True):
        kept = state.array_records.get("fl-bn/local")
        assert (kept is not None and not np.array_equal(arrays_of(kept)["9.weight"], start()["9.weight"])) == (trained > 0)


# What clients tell of the BatchNorm that they keep

RUN: dict[str, Any] = {
    "model": "mlp", "setup": "experiments.papers:Papers",
    "dataset": "digits-plain", "shifts": "none,invert,contrast", "partition": "domain", "clients": 3, "rounds": 2,
    "local-steps": 2, "evaluate-every": 2, "pictures": False,
}  # fmt: skip


def made(folder: Path, **values: Any) -> Path:
    path = run_in_process({**RUN, "output": str(folder), **{k.replace("_", "-"): v for k, v in values.items()}})
    assert path is not None
    return path


@listed(("method", "keys"), [("fedbn", {"weight", "bias", "running_mean", "running_var"}), ("silobn", {"running_mean", "running_var"})])
def test_the_average_for_an_unseen_client_is_told_where_the_run_says_so_and_changes_nothing(
    method: str, keys: set[str], tmp_path: Path
) -> None:
    run, plain = made(tmp_path / "told", method=method, unseen_client=True), made(tmp_path / "plain", method=method)
    told, own = load_file(run / "unseen-client.safetensors"), [load_file(p) for p in sorted((run / "clients").iterdir())]
    assert len(own) == 3
    assert {name.rpartition(".")[2] for name in told} == keys
    for name, tensor in told.items():
        assert torch.allclose(tensor, torch.stack([client[name].double() for client in own]).mean(0).float(), rtol=1e-6, atol=1e-7)
        assert not torch.equal(tensor, own[0][name])  # control: the clients differ
    assert not (plain / "unseen-client.safetensors").exists()
    for one, said in ((run, True), (plain, False)):
        assert (",kept," in (one / "disclosure.csv").read_text()) is said
    models = [load_file(one / "model.safetensors") for one in (run, plain)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])


def test_methods_that_keep_nothing_of_batch_norm_are_not_asked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unseen-client"):
        made(tmp_path, method="hbn", unseen_client=True)
