"""Clients with models of their own: what they save, keep and tell."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fl_bn import convert
from fl_bn.data.dataset import to_input
from fl_bn.methods import METHODS, Role
from tests.in_process import Samples, WatchedGrid, arrays_of, client_app, identical, run
from tests.integration.runs import tiny
from tests.listed import listed
from tests.networks import seeded_network


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name]().personal and METHODS[name]().shares(Role.WEIGHT)])
def test_clients_with_models_of_their_own_evaluate_and_save_what_they_made_and_the_server_does_not(
    name: str, clients: list[Samples], tmp_path: Path
) -> None:
    def never(model: torch.nn.Module) -> dict[str, float]:
        raise AssertionError("the server has no such model")

    method = METHODS[name]()
    grid = WatchedGrid(client_app(method, clients, folder=tmp_path), 3)
    ran = run(method, clients, 3, grid=grid, evaluate=never, save_clients="run", policy={"evaluate_every": 2, "fraction": 0.7})
    assert [bool(record.evaluation) for record in ran.records] == [False, True, True]
    assert grid.kinds().count("evaluate 2") == 1
    last = ran.records[-1]
    accuracy = np.array([last.client_evaluation[client]["accuracy"] for client in range(3)])
    assert last.evaluation["accuracy"] == pytest.approx(accuracy.mean())
    assert last.evaluation["accuracy-std"] == pytest.approx(accuracy.std())
    assert last.evaluation["accuracy-min"] == accuracy.min()
    for client in range(3):  # by hand: the saved model has the accuracy that was reported, and the layers that the client keeps
        model, saved = convert(seeded_network("cnn"), method), load_file(tmp_path / "run" / "clients" / f"client-{client}.safetensors")
        model.load_state_dict(saved)
        with torch.no_grad():
            predicted = model.eval()(to_input(clients[client].x, torch.float32)).argmax(1)
        assert float((predicted == clients[client].y).double().mean()) == pytest.approx(accuracy[client])
        kept = arrays_of(grid.states()[client].array_records["fl-bn/local"])
        assert identical({k: saved[k].numpy() for k in kept}, kept)


@listed(("method", "keys"), [("fedbn", {"weight", "bias", "running_mean", "running_var"}), ("silobn", {"running_mean", "running_var"})])
def test_the_average_for_an_unseen_client_is_told_where_the_run_says_so_and_changes_nothing(
    method: str, keys: set[str], tmp_path: Path
) -> None:
    run, plain = tiny(tmp_path / "told", method, **{"unseen-client": True}), tiny(tmp_path / "plain", method)
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
