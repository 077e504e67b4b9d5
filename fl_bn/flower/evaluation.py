"""What the clients' own evaluations say together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from flwr.app import Message, MetricRecord

from fl_bn.federation.metrics import fits, over_clients
from fl_bn.federation.record import RoundRecord
from fl_bn.flower.replies import Reading, read_replies
from fl_bn.task import Task


def evaluation_at_clients(
    record: RoundRecord,
    replies: Iterable[Message],
    reading: Reading,
    task: Task,
    missing: Callable[[Mapping[int, str]], None],
) -> MetricRecord | None:
    """What ``over_clients`` makes of the clients' metrics; each one's own loss and metric go into ``record``.

    ``missing`` is told whose evaluation is not used, and why.
    """
    came, refused, _ = read_replies(replies, reading)
    missing(refused)
    measured = {reply.client: reply.metrics for reply in came if fits(task, task.metric, reply.metrics[task.metric])}  # NaN: no label
    if not measured:
        return None
    record.client_evaluation = {index: {k: m[k] for k in ("loss", task.metric)} for index, m in measured.items()}
    return MetricRecord({**over_clients(task, [dict(m) for m in measured.values()])})
