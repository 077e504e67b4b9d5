"""Clients with data of their own, named in their node configs: with and without a data set on the server; and devices of their own."""

from __future__ import annotations

import os
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
from fl_bn.apps.client import build_client as built
from fl_bn.conversion import convert
from fl_bn.federation.local import evaluate
from fl_bn.flower import InProcessGrid, RunFailed
from fl_bn.methods import METHODS
from fl_bn.run.assembly import OwnData, client_samples, partition_of, source_model
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.device import device
from server_app.app import app as server_app
from tests.experiment.resuming import network, small_run
from tests.experiment.small_data import small_npz
from tests.integration.runs import table
from tests.listed import listed

CLASSES, SIDE = 3, 4
build_client = partial(built, folder=Path(__file__).parents[2])  # as client_app/ does it
SITES = {
    "dataset": "sites",
    "data_path": "",
    "classes": CLASSES,
    "channels": 1,
    "image_size": SIDE,
    "rounds": 2,
    "evaluate_every": 1,
    "partition": "auto",
}


def site_npz(folder: Path, number: int, *, classes: int = CLASSES, side: int = SIDE, colours: int = 0, samples: int = 20) -> Path:
    """A site's own file; every site's images are brighter than the last one's."""
    rng = np.random.default_rng(number)
    shape, arrays = (side, side, colours) if colours else (side, side), {}
    for split, n in (("train", samples), ("test", 10 + number)):
        y = np.arange(n) % classes
        noise = rng.integers(0, 40, (n, *shape))
        arrays[f"x_{split}"] = (40 * y.reshape(-1, *[1] * len(shape)) + 20 * number + noise).astype(np.uint8)
        arrays[f"y_{split}"] = y
    file = folder / f"site-{number}-{classes}-{side}-{colours}.npz"
    np.savez(file, **arrays)
    return file


class SitesGrid(InProcessGrid):
    """Every node has a node config of its own."""

    def __init__(self, config: Mapping[str, Any], sites: Sequence[Mapping[str, str]]) -> None:
        super().__init__(client_app, len(sites), config)
        for context, own in zip(self._contexts.values(), sites, strict=True):
            context.node_config.update(own)


def play(config: Mapping[str, Any], sites: Sequence[Mapping[str, str]]) -> Path:
    """The run directory."""
    server_app(SitesGrid(config, sites), Context(1, 0, {}, RecordDict(), dict(config)))
    return Path(str(config["output"])) / "run"


def own(file: Path) -> dict[str, str]:
    return {"dataset": "npz", "data-path": str(file)}


@pytest.fixture
def sites(tmp_path: Path) -> list[dict[str, str]]:
    return [own(site_npz(tmp_path, number)) for number in range(3)]


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "hbn", "fbn", "fedtan"])
def test_sites_train_and_evaluate_on_their_own_data_which_the_server_never_sees(
    method: str, sites: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("the server has no data")

    values = small_run(tmp_path / "runs", method=method, **SITES)
    monkeypatch.setattr("fl_bn.run.testing.dataset", never)
    path = play(values, sites)
    rounds, clients = table(path / "rounds.csv"), table(path / "clients.csv")
    assert [row["aggregated"] for row in rounds] == ["True", "True"]
    last = [row for row in clients if row["round"] == "2"]
    accuracies = np.array([float(row["accuracy"]) for row in last])
    assert float(rounds[-1]["accuracy"]) == pytest.approx(accuracies.mean())
    assert float(rounds[-1]["accuracy-std"]) == pytest.approx(accuracies.std())
    assert float(rounds[-1]["accuracy-min"]) == accuracies.min()
    assert float(rounds[-1]["test-loss"]) == pytest.approx(np.mean([float(row["test-loss"]) for row in last]))
    config = RunConfig.from_mapping(values)
    for number, row in enumerate(last):  # by hand: the model that is saved, on the site's own test images
        model = network(CLASSES, 1, SIDE)
        personal = METHODS[method]().personal
        trained = convert(model, METHODS[method]())
        saved = path / "clients" / f"client-{number}.safetensors" if personal else path / "model.safetensors"
        trained.load_state_dict(load_file(saved), strict=False)
        _, test, counts = client_samples(config, number, OwnData(**{"dataset": "npz", "path": sites[number]["data-path"]}))
        found = evaluate(trained, test)
        assert len(test) == 10 + number
        assert (found["accuracy"], found.loss) == (pytest.approx(float(row["accuracy"])), pytest.approx(float(row["test-loss"]), rel=1e-5))
        assert counts == (7, 7, 6)
    assert len({row["loss"] for row in last}) == 3  # control: they are different sites
    assert (path / "clients").exists() == METHODS[method]().personal


def context(values: Mapping[str, Any], node: Mapping[str, str], index: int = 0, clients: int = 3) -> Context:
    return Context(1, index + 1, {"partition-id": index, "num-partitions": clients, **node}, RecordDict(), dict(values))


def test_a_site_that_names_no_data_is_told_how(tmp_path: Path, sites: list[dict[str, str]]) -> None:
    values = small_run(tmp_path / "runs", **SITES)
    for node in ({}, {"data-path": sites[0]["data-path"]}, {"dataset": ""}):
        with pytest.raises(
            ConfigError, match="this client's node config names no data: start the client with .*dataset='npz' data-path='/data/site.npz'"
        ):
            build_client(context(values, node))
    with pytest.raises(RunFailed, match="node 2 cannot take part: ConfigError: the run is for dataset='sites'"):
        play(values, [sites[0], {}, sites[2]])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"classes": 5}, r"the run has 3 classes, 0..2, but these data have labels up to 4"),
        ({"colours": 3}, "the run takes 1 channels of 4 x 4 pixels, but these data have 3 of 4 x 4"),
    ],
)
def test_data_of_another_form_are_refused_with_both(wrong: dict[str, int], told: str, tmp_path: Path, sites: list[dict[str, str]]) -> None:
    values, file = small_run(tmp_path / "runs", **SITES), site_npz(tmp_path, 1, **wrong)
    with pytest.raises(ConfigError, match=rf"this client's own 'npz' \(.*{file.name}\): {told}"):
        build_client(context(values, own(file)))
    with pytest.raises(RunFailed, match=rf"node 2 cannot take part: ConfigError: this client's own .*{told}"):
        play(values, [sites[0], own(file), sites[2]])


def test_images_of_another_size_are_resized_to_the_runs(tmp_path: Path) -> None:
    values, file = small_run(tmp_path / "runs", **SITES), site_npz(tmp_path, 1, side=8)
    assert build_client(context(values, own(file))).site.train.x.shape == (20, 1, SIDE, SIDE)
    values = small_run(tmp_path / "runs")  # the run's own data have a size, which no key names
    with pytest.raises(ConfigError, match="the run takes 1 channels of 4 x 4 pixels, but these data have 1 of 8 x 8"):
        build_client(context(values, own(file)))


def test_sites_beside_a_data_set_of_the_run(tmp_path: Path) -> None:
    """The server has a test set; one client brings data of its own, of fewer classes; the others take their part of the run's."""
    values = small_run(tmp_path / "runs", method="fbn", pictures=True, rounds=2)
    assert source_model(RunConfig.from_mapping(values))(torch.zeros(2, 1, 4, 4)).shape == (2, 4)
    path = play(values, [{}, own(site_npz(tmp_path, 1, classes=2, samples=30)), {}])
    samples = {row["client"]: row["samples"] for row in table(path / "clients.csv")}
    assert set(samples) == {"0", "1", "2"}
    assert "accuracy after round 2" in (path / "summary.md").read_text()
    assert (path / "labels.png").exists()


def test_the_run_of_sites_that_name_the_runs_own_file_is_a_run_on_it(tmp_path: Path) -> None:
    """One client, with the whole of it."""
    values = small_run(tmp_path / "a", method="fbn", clients=1)
    plain = play(values, [{}])
    same = play(values | {"output": str(tmp_path / "b")}, [own(small_npz(tmp_path))])
    ours, theirs = load_file(plain / "model.safetensors"), load_file(same / "model.safetensors")
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)


# State, and devices


def test_a_site_keeps_its_own_in_its_own_folder(sites: list[dict[str, str]], tmp_path: Path) -> None:
    folders = [tmp_path / f"state-{number}" for number in range(3)]
    nodes = [{**site, "state-dir": str(folder)} for site, folder in zip(sites, folders, strict=True)]
    path = play(small_run(tmp_path / "runs", method="fedbn", **SITES, checkpoint_every=0), nodes)
    assert not (path / "clients").exists()
    assert not list(path.glob("state-*"))
    for number, folder in enumerate(folders):
        assert [file.name for file in folder.rglob("*.safetensors") if file.name.startswith("client-")] == [f"client-{number}.safetensors"]
        assert {file.parent.name for file in folder.rglob("round-*")} == {f"client-{number}"}


def test_without_a_folder_or_checkpoints_nothing_is_written(sites: list[dict[str, str]], tmp_path: Path) -> None:
    values = small_run(tmp_path / "runs", method="fedbn", **SITES, checkpoint_every=0)
    assert build_client(context(values, sites[0])).site.state is None
    assert build_client(context(values | {"checkpoint-every": 1}, sites[0])).site.state == tmp_path / "runs"
    assert build_client(context(values, {**sites[0], "state-dir": str(tmp_path / "x")})).site.state == tmp_path / "x"


@pytest.mark.parametrize(
    ("run", "node", "chosen"), [("cpu", "", "cpu"), ("cuda:3", "cpu", "cpu"), ("auto", "cpu", "cpu"), ("cpu", "cpu", "cpu")]
)
def test_a_client_computes_where_its_node_config_says(run: str, node: str, chosen: str, tmp_path: Path) -> None:
    values = small_run(tmp_path / "runs", device=run)
    client = build_client(context(values, {"device": node} if node else {}))
    assert client.site.device == torch.device(chosen)
    assert {p.device for p in client.model.parameters()} == {torch.device(chosen)}


def test_auto_is_a_gpu_where_torch_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.from_mapping({"device": "cpu"})
    for seen, chosen in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda seen=seen: seen)
        assert device(config, {"device": "auto"}) == torch.device(chosen)
    assert device(config, {}) == torch.device("cpu")


@pytest.mark.parametrize("wanted", [True, False])
def test_on_a_gpu_kernels_have_one_order_of_sums_unless_the_run_says_otherwise(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[bool, bool]]()
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda wanted, warn_only: asked.append((wanted, warn_only)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    config = RunConfig.from_mapping({"device": "cpu"} | ({} if wanted else {"deterministic": False}))
    device(config)
    assert (asked, "CUBLAS_WORKSPACE_CONFIG" in os.environ) == ([], False)
    device(config, {"device": "cuda"})
    assert (asked, os.environ["CUBLAS_WORKSPACE_CONFIG"]) == ([(wanted, True)], ":4096:8")


def test_a_device_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.from_mapping({"device": "cpu"})
    for name in ("tpu", "cuda:x", "gpu"):
        with pytest.raises(ConfigError, match=f"device must be auto, cpu, cuda or cuda:0 ..., but the node config has '{name}'"):
            device(config, {"device": name})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device(config, {"device": "cuda:1"}) == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="device=cuda:2, but torch sees 2 GPU in this process"):
        device(config, {"device": "cuda:2"})


@listed("key", ["partition-id", "num-partitions"])
@listed("value", ["x", "", "0x1", "9" * 5000, None, float("inf"), float("nan"), [1]])
def test_a_node_config_that_counts_nothing_is_refused_by_key(key: str, value: object) -> None:
    node = {"partition-id": 0, "num-partitions": 3, key: value}
    with pytest.raises(ConfigError, match=f"{key} in this client's node config must be a whole number, but got"):
        partition_of(node, RunConfig(clients=3))
    assert partition_of({"partition-id": "1", "num-partitions": 3}, RunConfig(clients=3)) == 1  # control: Flower's texts are fine


def test_a_node_without_a_partition_takes_its_place_among_the_run_s_nodes() -> None:
    config = RunConfig(clients=3, client_nodes="17,5,9")
    assert [partition_of({"site": "x"}, config, node) for node in (5, 9, 17)] == [1, 2, 0]
    with pytest.raises(ConfigError, match=r"takes no part in this run, which was submitted for other nodes"):
        partition_of({}, config, 6)
    with pytest.raises(ConfigError, match="names no partition"):
        partition_of({}, RunConfig(clients=3), 5)
    assert partition_of({"partition-id": 2, "num-partitions": 3}, config, 5) == 2  # what a node says of itself is for the server to check
