"""One file of one's own adds a method with an option, an option of local training, or a transport: printed, checked, and used in a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from fl_bn import Federation, SeededBatches, methods
from fl_bn.app.config import ConfigError, RunConfig
from fl_bn.app.run_keys import VALUES
from fl_bn.cli.main import app
from fl_bn.federation.federation import SGD_05
from fl_bn.federation.policy import RunSpec, ServerPolicy, constant_rate
from fl_bn.federation.run import run
from fl_bn.federation.server import Server
from fl_bn.federation.settings import LEARNING_RATE, LocalTraining
from fl_bn.flower import run_in_process
from tests.extension import threads_transport
from tests.extension.package import forget, installed
from tests.federation import random_samples
from tests.integration.runs import TINY
from tests.refusals import naming

HERE = Path(__file__).parent
EMPTY = {"additions": '"""What this package adds to fl-bn."""\n'}
PLAIN = {**TINY, "method": "fedavg", "rounds": 2}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a package that adds nothing yet."""
    with installed(tmp_path / "site", EMPTY, monkeypatch):
        yield tmp_path / "site"


def add(site: Path, name: str) -> None:
    """Write ``tests/extension/NAME.py`` into the one file of the package."""
    (site / "own_package" / "additions.py").write_text((HERE / f"{name}.py").read_text())
    forget()


def weights(tmp_path: Path, **keys: Any) -> dict[str, torch.Tensor]:
    """Return the network after a short run."""
    output = str(tmp_path / f"runs-{len(list(tmp_path.iterdir()))}")
    values = {**PLAIN, "output": output, **{key.replace("_", "-"): value for key, value in keys.items()}}
    folder = run_in_process(RunConfig.from_mapping(values).to_mapping())
    assert folder is not None
    return load_file(folder / "model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def printed(*arguments: str) -> list[str]:
    return CliRunner().invoke(app, ["config", *arguments]).output.splitlines()


def refused(name: str, keys: dict[str, Any]) -> None:
    with naming(name, ConfigError):
        RunConfig.from_mapping(keys)


def test_a_method_with_an_option_is_one_file(site: Path, tmp_path: Path) -> None:
    add(site, "halves")
    assert "- `halves-weight=0.5` ((0, 1]): halves: weight of a round's pooled moments (h in the paper)" in printed()
    assert "halves-weight = 0.5" in printed("--toml")
    refused("halves-weight", {"method": "halves", "halves-weight": 2})
    refused("method='halves'", {"method": "fedavg", "halves-weight": 0.3})  # to which the key belongs
    ran = weights(tmp_path, method="halves", halves_weight=0.3, halves_report="pass")
    assert equal(ran, weights(tmp_path, method="fbn", fbn_momentum=0.3, fbn_report="pass", setup="experiments.papers:Papers"))
    assert not equal(ran, weights(tmp_path, method="halves", halves_report="pass"))  # control


def test_a_local_training_option_is_one_file(site: Path, tmp_path: Path) -> None:
    without = weights(tmp_path)
    add(site, "dampened")
    assert "- `dampening=0.0` ([0, 1)): share of a gradient that momentum leaves out" in printed()
    keys = list(RunConfig.keys())
    assert keys[keys.index("dampening") - 1] == "client-weights"  # behind the option that is declared before it
    refused("dampening", {"dampening": 1.0})
    refused("'dampening'", {"dampenin": 0.1})  # did you mean
    refused("optimizer='sgd'", {"dampening": 0.5, "optimizer": "adam", "momentum": 0.0})
    training = RunConfig.from_mapping({"dampening": 0.5, "batch-size": 8}).local_training()
    assert isinstance(training, VALUES[LocalTraining])
    assert (training.batch_size, training.momentum) == (8, 0.9)  # the keys that all have reach it, too
    (group,) = training.make_optimizer([nn.Parameter(torch.ones(1))], 0.1).param_groups
    assert (group["dampening"], group["momentum"]) == (0.5, 0.9)
    assert equal(without, weights(tmp_path))  # its default changes no bit
    assert not equal(without, weights(tmp_path, dampening=0.5))


def test_defaults_that_stand_twice_agree_or_are_told_apart_in_the_documentation() -> None:
    """How a run config differs from ``Federation``."""
    assert SGD_05.keywords == {"lr": LEARNING_RATE, "momentum": RunConfig().momentum}
    assert RunConfig().learning_rate == LEARNING_RATE == constant_rate(1, 2)
    page = (HERE.parents[1] / "docs" / "start" / "plain-torch.md").read_text()
    taken = {"local_epochs": signature(Federation).parameters["local_epochs"].default, "evaluate_every": RunSpec().evaluate_every}
    here = taken | {key: RunConfig()[key] for key in ("local-steps", "evaluate-every", "learning-rate-schedule", "weight-decay")}
    assert [name for name, value in here.items() if f"| `{name}={value!r}` |" not in page] == []


# A transport that somebody else writes


CLIENTS = [random_samples(n) for n in (12, 16, 20)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "fbn", "silobn", "fixbn"])
def test_threads_give_the_numbers_of_a_federation(name: str) -> None:
    """Both draw the same batches; the optimiser is the same, unclipped."""
    assert len(Path(threads_transport.__file__).read_text().splitlines()) < 60
    method = getattr(methods, name)()
    settings = LocalTraining(batch_size=8, epochs=1, momentum=0.0, clip="none")
    server = Server(net(), method, ServerPolicy(clients=3, rate=lambda round, rounds: 0.1))
    records = [one.record for one in run(server, threads_transport.Threads(server, net(), CLIENTS, settings), 3)]
    batches = [SeededBatches(one.x, one.y, 8) for one in CLIENTS]
    known = Federation(net(), method, batches, optimizer=partial(torch.optim.SGD, lr=0.1), clip="none")
    assert [(r.aggregated, r.loss) for r in records] == [(True, pytest.approx(r.loss, rel=1e-6)) for r in known.run(3)]
    for key, tensor in known.server.shared.tensors().items():
        assert torch.allclose(server.shared.tensors()[key], tensor, atol=1e-6), key
    assert len({round(r.loss, 6) for r in records}) == 3  # control: it does train
