"""What the clients' own evaluations say together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np
from flwr.app import Message, MetricRecord

from fl_bn.federation import schema
from fl_bn.federation.metrics import mean_over_clients
from fl_bn.federation.record import RoundRecord
from fl_bn.flower.codec import Header
from fl_bn.flower.log import log
from fl_bn.flower.messages import EVALUATED
from fl_bn.flower.population import Client
from fl_bn.flower.replies import read_replies


def evaluation_at_clients(
    record: RoundRecord, replies: Iterable[Message], clients: Sequence[Client], header: Header, sent: Iterable[Message]
) -> MetricRecord | None:
    """Mean, standard deviation and minimum of the clients' accuracies, each client counted once; each one's goes into ``record``.

    Of mean IoU and of the accuracies per class, the mean over the clients that have them.
    """
    came, refused, _ = read_replies(replies, clients, schema.Schema({}), header, EVALUATED, sent)
    for index, reason in refused.items():
        log(logging.WARNING, "client %s did not evaluate: %s", index, reason)
    measured = {reply.client: reply.metrics for reply in came if 0 <= reply.metrics["accuracy"] <= 1}  # NaN: without a label
    if not measured:
        return None
    record.client_evaluation = {index: {k: m[k] for k in ("loss", "accuracy")} for index, m in measured.items()}
    accuracy = np.array([m["accuracy"] for m in measured.values()])
    loss = float(np.mean([m["loss"] for m in measured.values()]))
    spread = {"accuracy": float(accuracy.mean()), "accuracy-std": float(accuracy.std()), "accuracy-min": float(accuracy.min())}
    return MetricRecord({**spread, "loss": loss, **mean_over_clients(list(measured.values()))})
