"""Clients with data of their own, named in their node configs: with and without a data set on the server; and devices of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file

from client_app.app import app as client_app
from fl_bn.app.assembly import partition_of
from fl_bn.app.client import build_client as built
from fl_bn.app.device import device
from fl_bn.flower import InProcessGrid, RunFailed
from fl_bn.methods import METHODS
from server_app.app import app as server_app
from tests.conformance.cases import every_method
from tests.experiment.inside import OwnData, client_samples, config, convert, evaluate, refusing
from tests.experiment.resuming import network, small_run
from tests.experiment.small_data import small_npz
from tests.integration.runs import table
from tests.listed import listed

CLASSES, SIDE = 3, 4
build_client = partial(built, folder=Path(__file__).parents[2])  # as client_app/ does it
SITES = {
    "dataset": "sites", "data_path": "", "classes": CLASSES, "channels": 1, "image_size": SIDE, "rounds": 2, "evaluate_every": 1,
    "partition": "auto",
}  # fmt: skip


def site_npz(folder: Path, number: int, classes: int = CLASSES, samples: int = 20, **form: int) -> Path:
    """Write a site's own file; every site's images are darker than the last one's."""
    name = f"site-{number}-{classes}-{'-'.join(map(str, form.values()))}"
    return small_npz(folder, name, 1 - number / 5, classes, samples=(samples, 10 + number), **form)


def play(config: Mapping[str, Any], sites: Sequence[Mapping[str, str]]) -> Path:
    """Run with a node config for each site; return the run directory."""
    grid = InProcessGrid(client_app, len(sites), config)
    for context, own in zip(grid._contexts.values(), sites, strict=True):
        context.node_config.update(own)
    server_app(grid, Context(1, 0, {}, RecordDict(), dict(config)))
    return Path(str(config["output"])) / "run"


def own(file: Path) -> dict[str, str]:
    return {"dataset": "npz", "data-path": str(file)}


@pytest.fixture
def sites(tmp_path: Path) -> list[dict[str, str]]:
    return [own(site_npz(tmp_path, number)) for number in range(3)]


def test_a_site_holds_out_validation_samples_of_its_own(sites: list[dict[str, str]], tmp_path: Path) -> None:
    values = small_run(tmp_path / "runs", method="gn", **SITES)
    train, test, counts = client_samples(config(values, validation_share=0.2), 0, OwnData("npz", sites[0]["data-path"]))
    assert (len(train), len(test), sum(counts)) == (16, 4, 16)


@every_method
def test_sites_train_and_evaluate_on_their_own_data(method_name: str, sites: list[dict[str, str]], tmp_path: Path) -> None:
    method = METHODS[method_name]()
    values = small_run(tmp_path / "runs", method=method_name, **SITES)
    path = play(values, sites)
    rounds, last = table(path / "rounds.csv"), [row for row in table(path / "clients.csv") if row["round"] == "2"]
    accuracies = np.array([float(row["accuracy"]) for row in last])
    found = [float(rounds[-1][f"accuracy{of}"]) for of in ("", "-std", "-min")]
    assert found == pytest.approx([accuracies.mean(), accuracies.std(), accuracies.min()])
    for number, row in enumerate(last):  # by hand: the model that is saved, on the site's own test images
        trained = convert(network(CLASSES, 1, SIDE), method)
        saved = path / "clients" / f"client-{number}.safetensors" if method.personal else path / "model.safetensors"
        trained.load_state_dict(load_file(saved), strict=False)
        _, test, counts = client_samples(config(values), number, OwnData("npz", sites[number]["data-path"]))
        found = evaluate(trained, test)
        assert (len(test), counts) == (10 + number, (7, 7, 6))
        assert (found["accuracy"], found.loss) == (pytest.approx(float(row["accuracy"])), pytest.approx(float(row["test-loss"]), rel=1e-5))
    assert len({row["loss"] for row in last}) == 3  # control: they are different sites


def context(values: Mapping[str, Any], node: Mapping[str, str], index: int = 0, clients: int = 3) -> Context:
    return Context(1, index + 1, {"partition-id": index, "num-partitions": clients, **node}, RecordDict(), dict(values))


@listed(
    ("wrong", "about"),
    [
        ({}, "dataset='sites'"),
        ({"dataset": "npz", "data-path": "nowhere.npz"}, "nowhere.npz"),
        ({"dataset": "imagenet"}, "imagenet"),
        ({"classes": 5}, "up to 4"),
        ({"colours": 3}, "3 of 4 x 4"),
    ],
)
def test_data_that_are_not_there_or_of_another_form_end_the_run_by_the_site_s_name(
    wrong: dict[str, Any], about: str, tmp_path: Path, sites: list[dict[str, str]]
) -> None:
    node = own(site_npz(tmp_path, 1, **wrong)) if {"classes", "colours"} & wrong.keys() else wrong
    with refusing("node 3", about, by=RunFailed):
        play(small_run(tmp_path / "runs", **SITES), [sites[0], sites[1], node])


def test_what_a_site_may_have_otherwise(tmp_path: Path, sites: list[dict[str, str]]) -> None:
    """Fewer classes, images of another size, and nothing to tell of its labels. Beside a data set of the run, too."""
    values = small_run(tmp_path / "runs", **SITES, pictures=True)
    path = play(values, [sites[0], own(site_npz(tmp_path, 1, classes=2)), own(site_npz(tmp_path, 2, side=8))])
    assert (path / "labels.png").exists()
    client = build_client(context(values, sites[1], 1))
    assert (len(client.site.train), client.introduce()["label-counts"]) == (20, "[7, 7, 6]")  # all of its data
    assert build_client(context(values, {**sites[1], "share-label-counts": False}, 1)).introduce()["label-counts"] == "[]"
    mixed = play(small_run(tmp_path / "mixed", method="fbn", rounds=2), [{}, own(site_npz(tmp_path, 1, classes=2, samples=30)), {}])
    assert {row["client"] for row in table(mixed / "clients.csv")} == {"0", "1", "2"}
    assert "accuracy after round 2" in (mixed / "summary.md").read_text()


def test_a_site_keeps_its_own_in_its_own_folder(sites: list[dict[str, str]], tmp_path: Path) -> None:
    nodes = [{**site, "state-dir": str(tmp_path / f"state-{number}")} for number, site in enumerate(sites)]
    path = play(small_run(tmp_path / "runs", method="fedbn", **SITES, checkpoint_every=0), nodes)
    assert [*path.glob("clients"), *path.glob("state-*")] == []
    for number in range(3):
        files = list((tmp_path / f"state-{number}").rglob("*.safetensors"))
        assert [file.name for file in files if file.name.startswith("client-")] == [f"client-{number}.safetensors"]
        assert {file.parent.name for file in files if file.name.startswith("round-")} == {f"client-{number}"}


def test_a_client_computes_where_its_node_config_says(tmp_path: Path) -> None:
    client = build_client(context(small_run(tmp_path / "runs", device="cuda:3"), {"device": "cpu"}))
    assert {client.site.device, *(p.device for p in client.model.parameters())} == {torch.device("cpu")}
    for name in ("tpu", "cuda:x", "cuda:63"):
        with refusing("device", name):
            device(config(device="cpu"), {"device": name})


@listed("key", ["partition-id", "num-partitions"])
@listed("value", ["x", "9" * 5000, None, float("nan")])
def test_a_node_config_that_counts_nothing_is_refused_by_key(key: str, value: object) -> None:
    with refusing(key):
        partition_of({"partition-id": 0, "num-partitions": 3, key: value}, config(clients=3))


def test_a_node_without_a_partition_takes_its_place_among_the_run_s_nodes() -> None:
    made = config(clients=3, client_nodes="17,5,9")
    assert [partition_of({"site": "x"}, made, node) for node in (5, 9, 17)] == [1, 2, 0]
    with refusing("run"):
        partition_of({}, made, 6)
    assert partition_of({"partition-id": "2", "num-partitions": 3}, made, 5) == 2  # what a node says of itself is for the server to check
