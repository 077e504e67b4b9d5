"""Test the model of a run on all test data, and on those of each domain."""

from __future__ import annotations

import math
from statistics import fmean

import torch
from torch import nn

from fl_bn.app.assembly import dataset, task
from fl_bn.app.config import SITES, RunConfig
from fl_bn.app.history import named_per_domain, per_domain
from fl_bn.bn.modules import copied
from fl_bn.data.partition import BY_DOMAIN
from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.record import RoundRecord
from fl_bn.task import MetricState


def test_metrics(config: RunConfig, model: nn.Module, device: torch.device) -> dict[str, float]:
    """Return name -> value of each metric of ``model`` on the test data, as in ``RoundRecord``."""
    data, model = dataset(config), copied(model).to(device)
    of = task(config, data.y_test)
    if data.domain_test is None:
        return evaluate(model, Samples(data.x_test, data.y_test), task=of).result()
    parts: dict[str, MetricState] = {}
    for index, name in enumerate(data.domains):
        chosen = data.domain_test == index
        if bool(chosen.any()):
            parts[name] = evaluate(model, Samples(data.x_test[chosen], data.y_test[chosen]), task=of)
    return MetricState.union(parts.values()).result() | named_per_domain({name: part[of.metric] for name, part in parts.items()}, of)


def note_domains(config: RunConfig, record: RoundRecord) -> None:
    """Add the metric of each domain to ``record``, the mean over the domain's clients.

    This needs clients that evaluated their own models on their own domains. NaN: the
    domain's clients did not evaluate, since they diverged or, with models of their
    own, were not drawn to train yet. Where ``evaluate-clients`` draws them, domains
    that were not drawn are left out.
    """
    of, all_asked = task(config), not 0 < config.evaluate_clients < config.clients
    own = config.dataset != SITES and config.partition in BY_DOMAIN and config.test_on == "own"
    if not own or not record.client_evaluation or per_domain(record.evaluation, of):
        return
    names = dataset(config).domains
    for index, name in enumerate(names):
        values = [metrics[of.metric] for client, metrics in record.client_evaluation.items() if client % len(names) == index]
        if values or all_asked:
            record.evaluation.update(named_per_domain({name: fmean(values or [math.nan])}, of))
