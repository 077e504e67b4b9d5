"""The test of a run's model by domain, and the keys that make and limit the data."""

from __future__ import annotations

import math

import pytest
import torch

from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.record import RoundRecord
from fl_bn.models import build
from fl_bn.run.assembly import client_samples, dataset, partitions
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.history import per_domain, record_of, round_line
from fl_bn.run.testing import note_domains
from fl_bn.run.testing import test_metrics as metrics_of_test

SHIFTED = RunConfig(dataset="digits-plain", image_size=8, shifts="none,invert,noise", partition="domain", clients=3, model="mlp")


def test_accuracy_per_domain_is_that_on_the_domains_images() -> None:
    data = dataset(SHIFTED)
    model = build("mlp", classes=10, channels=data.channels, image_size=8, seed=0)
    found = metrics_of_test(SHIFTED, model, torch.device("cpu"))
    assert data.domain_test is not None
    for index, name in enumerate(data.domains):
        mine = data.domain_test == index
        assert per_domain(found)[name] == evaluate(model, Samples(data.x_test[mine], data.y_test[mine]))["accuracy"]
    whole = evaluate(model, Samples(data.x_test, data.y_test))
    assert found["accuracy"] == whole["accuracy"]
    assert math.isclose(found["loss"], whole.loss, rel_tol=1e-6)
    assert len(set(per_domain(found).values())) > 1  # control: the domains differ
    plain = RunConfig(dataset="digits-plain", image_size=8, model="mlp")
    assert per_domain(metrics_of_test(plain, model, torch.device("cpu"))) == {}


def test_a_domains_accuracy_is_the_mean_over_its_clients() -> None:
    config = RunConfig(**{**SHIFTED.__dict__, "clients": 5})
    own = {i: {"accuracy": a, "loss": 1.0} for i, a in enumerate((0.1, 0.5, 0.9, 0.3, 0.7))}
    record = RoundRecord(1, "train", 0.1, client_evaluation=own)
    note_domains(config, record)
    assert per_domain(record.evaluation) == {"none": pytest.approx(0.2), "invert": pytest.approx(0.6), "noise": pytest.approx(0.9)}
    assert per_domain(record_of(round_line(record)).evaluation) == per_domain(record.evaluation)
    untouched = RoundRecord(1, "train", 0.1)
    note_domains(config, untouched)
    iid = RoundRecord(1, "train", 0.1, client_evaluation=record.client_evaluation)
    note_domains(RunConfig(partition="iid", dataset="digits"), iid)
    assert untouched.evaluation == iid.evaluation == {}


def test_every_client_has_one_shift_and_is_tested_on_it() -> None:
    data = dataset(SHIFTED)
    assert data.domain_train is not None
    assert data.domain_test is not None
    for client, part in enumerate(partitions(SHIFTED)):
        assert set(data.domain_train[part].tolist()) == {client}
        train, test, _ = client_samples(SHIFTED, client)
        assert len(train) == len(part)
        assert torch.equal(test.x, data.x_test[data.domain_test == client])


def test_every_client_may_be_tested_on_all_domains() -> None:
    everywhere = RunConfig(**{**SHIFTED.__dict__, "test_on": "all"})
    for client, part in enumerate(partitions(everywhere)):
        train, test, _ = client_samples(everywhere, client)
        assert len(train) == len(part)
        assert torch.equal(test.x, dataset(everywhere).x_test)
    record = RoundRecord(1, "train", 0.1, client_evaluation={i: {"accuracy": 0.1, "loss": 1.0} for i in range(3)})
    note_domains(everywhere, record)
    assert record.evaluation == {}  # nobody has a domain's accuracy
    note_domains(SHIFTED, record)
    assert record.evaluation  # control


def test_samples_per_domain_and_equal_sizes() -> None:
    few = RunConfig(**{**SHIFTED.__dict__, "samples_per_domain": 20})
    assert [len(part) for part in partitions(few)] == [20, 20, 20]
    assert len(dataset(few).x_test) == len(dataset(SHIFTED).x_test)
    skewed = RunConfig(dataset="digits-plain", partition="dirichlet", partition_parameter=0.3, clients=4)
    natural = [len(part) for part in partitions(skewed)]
    equal = [len(part) for part in partitions(RunConfig(**{**skewed.__dict__, "sizes": "equal"}))]
    assert equal == [min(natural)] * 4
    assert len(set(natural)) > 1  # control


def test_measurements_have_no_shift_and_plain_data_no_domain() -> None:
    with pytest.raises(ConfigError, match="partition=natural needs data with domains, but digits-plain has none"):
        partitions(RunConfig(dataset="digits-plain", partition="natural"))
    with pytest.raises(ConfigError, match="shifts must be at least one of"):
        dataset(RunConfig(dataset="digits-plain", shifts="none,none"))
