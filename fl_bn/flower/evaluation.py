"""What the clients' own evaluations say together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from flwr.app import Message, MetricRecord

from fl_bn.called import UNNAMED, Called
from fl_bn.federation.metrics import fits, over_clients
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.replies import Expected
from fl_bn.federation.schema import Schema
from fl_bn.flower.codec import Header
from fl_bn.flower.log import log
from fl_bn.flower.messages import evaluated
from fl_bn.flower.population import Client
from fl_bn.flower.replies import Reading, read_replies, with_header
from fl_bn.task import Task


def evaluation_at_clients(
    record: RoundRecord,
    replies: Iterable[Message],
    clients: Sequence[Client],
    header: Header,
    sent: Iterable[Message],
    task: Task,
    called: Called = UNNAMED,
) -> MetricRecord | None:
    """What ``over_clients`` makes of the clients' metrics; each one's own loss and metric go into ``record``."""
    expected = Expected(header.round, header.signature, Schema({}), evaluated(task))
    came, refused, _ = read_replies(replies, Reading(clients, with_header(header, expected), sent))
    for index, reason in refused.items():
        log(logging.WARNING, "%s did not evaluate: %s", called.client(index), reason)
    measured = {reply.client: reply.metrics for reply in came if fits(task, task.metric, reply.metrics[task.metric])}  # NaN: no label
    if not measured:
        return None
    record.client_evaluation = {index: {k: m[k] for k in ("loss", task.metric)} for index, m in measured.items()}
    return MetricRecord({**over_clients(task, [dict(m) for m in measured.values()])})
