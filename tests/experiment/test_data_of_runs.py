"""Who trains and is tested on what: partitions and their table, domains, sites as clients, and the keys that limit the data."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from fl_bn.app.history import per_domain, round_line
from fl_bn.app.sweep.file import parse
from fl_bn.app.testing import note_domains
from fl_bn.app.testing import test_metrics as metrics_of_test
from fl_bn.federation.record import RoundRecord
from fl_bn.models import build
from fl_bn.robust.attacks import LABEL_FLIP
from tests.data.test_own_files import draw
from tests.experiment.inside import RunConfig, Samples, client_samples, config, dataset, evaluate, partitions, refusing
from tests.experiment.small_data import CLASSES, small_config, small_sites
from tests.experiment.test_task_runs import hospital
from tests.listed import listed

SHIFTED = {
    "setup": "experiments.papers:Papers",
    "dataset": "digits-plain", "image_size": 8, "shifts": "none,invert,noise", "partition": "domain", "clients": 3, "model": "mlp",
}  # fmt: skip


def test_accuracy_per_domain_is_that_on_the_domains_images() -> None:
    data = dataset(config(SHIFTED))
    model = build("mlp", classes=10, channels=data.channels, image_size=8, seed=0)
    found = metrics_of_test(config(SHIFTED), model, torch.device("cpu"))
    for index, name in enumerate(data.domains):
        mine = data.domain_test == index
        assert per_domain(found)[name] == evaluate(model, Samples(data.x_test[mine], data.y_test[mine]))["accuracy"]
    whole = evaluate(model, Samples(data.x_test, data.y_test))
    assert found["accuracy"] == whole["accuracy"]


@listed(("sampled", "empty"), [(0, [None]), (2, [])])
def test_the_domain_of_a_client_that_diverged_has_no_number(sampled: int, empty: list[None]) -> None:
    record = RoundRecord(1, "train", 0.1, client_evaluation={i: {"accuracy": 0.5, "loss": 1.0} for i in (0, 2)})
    note_domains(config(SHIFTED, method="fedbn", evaluate_clients=sampled), record)
    assert [*round_line(record)["per-domain"].values()] == [0.5, *empty, 0.5]  # with evaluate-clients=2, it was not asked


@pytest.mark.parametrize("tested", [{}, {"test_on": "all"}, {"evaluate_on": "training"}])
def test_every_client_has_one_shift_and_is_tested_as_the_keys_say(tested: dict[str, str]) -> None:
    made, data = config(SHIFTED, **tested), dataset(config(SHIFTED))
    for client, part in enumerate(partitions(made)):
        train, test, _ = client_samples(made, client)
        assert set(data.domain_train[part].tolist()) == {client}
        assert torch.equal(train.x, data.x_train[part])
        own = data.x_test[data.domain_test == client]
        assert torch.equal(test.x, data.x_test if "test_on" in tested else train.x if tested else own)


def test_samples_per_domain() -> None:
    few = config(SHIFTED, samples_per_domain=20)
    assert [len(part) for part in partitions(few)] == [20, 20, 20]
    assert len(dataset(few).x_test) == len(dataset(config(SHIFTED)).x_test)


@pytest.mark.parametrize("kind", ["npz", "folder", "csv", "a folder of csv"])
def test_what_is_given_per_site_is_a_client_and_is_never_cut_up(kind: str, tmp_path: Path) -> None:
    if kind == "npz":
        sites = small_sites(tmp_path)
    elif kind == "folder":
        sites = [str(tmp_path / f"site{number}") for number in range(5)]
        for site, split, name in product(range(5), ("train", "test"), ("cat", "dog")):
            draw(Path(sites[site]) / split / name / "a.png", (50 * site, 0, 0), (4, 4))
    else:
        sites = [str(hospital(tmp_path / "all", number)) for number in range(5)]
    path = str(tmp_path / "all") if kind == "a folder of csv" else ",".join(sites)
    keys = {"dataset": kind.split()[-1], "data-path": path, "model": "mlp"}
    by_default = {name: key.default for name, key in RunConfig.keys().items()}  # as Flower gives a run all of them
    (cell,) = parse({"title": "sites", "run": keys, "axes": {"method": {"BN": {"method": "fedavg"}}}}, "x", "", "", {}).cells(tmp_path)
    for made in (config(keys), config({**by_default, **keys}), cell.config):
        domains = dataset(made).domain_train
        assert made.clients == 5
        assert [part.tolist() for part in partitions(made)] == [(domains == site).nonzero()[:, 0].tolist() for site in range(5)]
    assert config(keys, hold_out=dataset(made).domains[2]).clients == 4
    assert config(keys, byzantine=1, attack="foe").clients == 6  # the attacker has a copy
    assert [config(keys, partition=name).clients for name in ("natural", "iid")] == [5, 10]
    assert config({**keys, "data-path": sites[0]}).clients == 10
    with refusing("data-path", "clients"):
        config(keys, clients=4)


@listed("kind", ["iid", "similarity", "dirichlet"])
@pytest.mark.parametrize("byzantine", [1, 4])
def test_the_data_are_the_honest_clients(kind: str, byzantine: int, tmp_path: Path) -> None:
    own = {**small_config(tmp_path), "partition": kind, "partition-parameter": 1.0 if kind == "iid" else 0.5}
    parts, honest = partitions(config({**own, "byzantine": byzantine})), 5 - byzantine
    assert sorted(torch.cat(parts[:honest]).tolist()) == list(range(48))  # each sample once
    assert all(torch.equal(parts[honest + i], parts[i % honest]) for i in range(byzantine))
    alone = partitions(config({**own, "clients": honest}))
    assert all(torch.equal(a, b) for a, b in zip(parts[:honest], alone, strict=True))


def test_label_flip_flips_the_labels_of_byzantine_clients_alone(tmp_path: Path) -> None:
    flipped = config({**small_config(tmp_path), "partition": "iid", "byzantine": 2, "attack": LABEL_FLIP})
    data = dataset(flipped)
    for client, part in enumerate(partitions(flipped)):
        (train, test, _), labels = client_samples(flipped, client), data.y_train[part]
        assert torch.equal(train.x, data.x_train[part])
        assert torch.equal(train.y, CLASSES - 1 - labels if client >= 3 else labels)
        assert torch.equal(test.y, data.y_test)
