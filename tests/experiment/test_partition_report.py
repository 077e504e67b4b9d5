"""A partition's table and picture, without training."""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from fl_bn.cli.partition import partition
from fl_bn.run.assembly import dataset, partitions
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.partition_report import write
from fl_bn.run.pictures import draw_labels
from fl_bn.sweep.file import parse
from tests.data.test_folder import draw
from tests.experiment.small_data import small_sites
from tests.experiment.test_tables import hospital

app = typer.Typer()
app.command()(partition)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_counts_every_client_and_domain_by_hand(tmp_path: Path) -> None:
    config = RunConfig.from_mapping({"clients": 3, "partition": "dirichlet", "partition-parameter": 0.5})  # digits: two domains
    rows = rows_of(write(config, tmp_path / "new" / "folder")[0])
    data = dataset(config)
    assert data.domain_train is not None
    for client, part in enumerate(partitions(config)):
        for number, domain in enumerate(data.domains):
            (row,) = (row for row in rows if (row["client"], row["domain"]) == (str(client), domain))
            mine = data.y_train[part][data.domain_train[part] == number].tolist()
            assert [int(row[f"class-{label}"]) for label in range(10)] == [mine.count(label) for label in range(10)]
            assert int(row["total"]) == len(mine)
    assert sum(int(row["total"]) for row in rows) == len(data.y_train)


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
    for config in (RunConfig.from_mapping(keys), RunConfig.from_mapping({**by_default, **keys}), cell.config):
        domains = dataset(config).domain_train
        assert domains is not None
        assert config.clients == 5
        assert [part.tolist() for part in partitions(config)] == [(domains == site).nonzero()[:, 0].tolist() for site in range(5)]
    assert RunConfig.from_mapping({**keys, "hold-out": dataset(config).domains[2]}).clients == 4
    assert RunConfig.from_mapping({**keys, "byzantine": 1, "attack": "foe"}).clients == 6  # the attacker has a copy
    assert [RunConfig.from_mapping({**keys, "partition": name}).clients for name in ("natural", "iid")] == [5, 10]
    assert RunConfig.from_mapping({**keys, "data-path": sites[0]}).clients == 10
    for wrong in ({"clients": 4}, {"clients": 10}, {"shifts": "none,invert"}):
        with pytest.raises(ConfigError, match="data-path names 5 files or folders, each of which is a client"):
            RunConfig.from_mapping({**keys, **wrong})


def test_domains_are_drawn_below_the_classes(tmp_path: Path) -> None:
    counts, domains = {0: (3, 1), 1: (0, 4)}, {"photo": [4, 0], "sketch": [0, 4]}
    drawn = {}
    for name, shown in {"none": None, "one": {"photo": [4, 4]}, "two": domains, "other": {"photo": [0, 4], "sketch": [4, 0]}}.items():
        draw_labels(counts, RunConfig(), tmp_path / f"{name}.png", shown)
        drawn[name] = matplotlib.image.imread(tmp_path / f"{name}.png")
    assert np.array_equal(drawn["none"], drawn["one"])
    assert drawn["two"].shape[0] > drawn["one"].shape[0]
    assert not np.array_equal(drawn["two"], drawn["other"])  # control


def test_the_command(tmp_path: Path) -> None:
    keys = "partition='table' partition-parameter=4 clients=5"
    done = CliRunner().invoke(app, ["--run-config", keys, "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"counts.csv", "labels.png"}
    refused = CliRunner().invoke(app, ["--run-config", keys.replace("5", "6"), "--output", str(tmp_path / "no")])
    assert refused.exit_code == 2
    assert not (tmp_path / "no").exists()
