"""Who did what in a round: from the checked replies to the round's record and the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from fl_bn.exchange.session import Traffic
from fl_bn.federation.record import ClientRecord, RoundRecord
from fl_bn.flower.codec import count_tensors
from fl_bn.flower.exchanges import Exchanges
from fl_bn.flower.log import log
from fl_bn.flower.population import Client
from fl_bn.flower.replies import Contribution, section_bytes
from fl_bn.methods import Phase


def enter(
    record: RoundRecord, cohort: Sequence[Client], contributions: Sequence[Contribution], refused: Mapping[int, str], exchanges: Exchanges
) -> None:
    """Add every client of the cohort to ``record``, and the bytes of the round; say who was refused, and why."""
    parts = {c.client.index: c for c in contributions}
    exchanging = Phase(record.phase) is Phase.EXCHANGE
    traffic = exchanges.session.traffic if exchanging else {}
    if exchanging:
        record.exchanges, record.carrier = exchanges.session.exchanges, exchanges.carrier
        record.bytes_down = {section: count * exchanges.messages for section, count in record.bytes_down.items()}
    shared_down = sum(record.bytes_down.values())
    for client in cohort:
        layers = traffic.get(client.index, Traffic())
        down = shared_down + layers.down
        if (part := parts.get(client.index)) is None:
            reason = refused[client.index]
            log(logging.WARNING, "round %s: client %s's reply is not used: %s", record.round, client.index, reason)
            record.clients.append(ClientRecord(client.index, bytes_down=down, exchanges=layers.exchanges, refused=reason))
            continue
        record.bytes_up, record.tensors_up = section_bytes(part.payload), count_tensors(part.payload)
        up = sum(record.bytes_up.values()) + layers.up
        loss, waited = part.metrics.get("loss", float("nan")), part.metrics.get("waited", 0.0)
        record.clients.append(ClientRecord(client.index, part.samples, part.steps, loss, down, up, layers.exchanges, waited))
    if traffic:
        record.bytes_down |= {"exchange": max(t.down for t in traffic.values())}
        record.bytes_up |= {"exchange": max(t.up for t in traffic.values())}
