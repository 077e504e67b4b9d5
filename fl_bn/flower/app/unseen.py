"""Average the layers that stay at the clients, for a new client that took no part in the training.

Paper: Li et al.: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021, appendix G.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fl_bn.federation.aggregation import average
from fl_bn.federation.replies import REPLIED, Expected
from fl_bn.federation.rounds import Rounds
from fl_bn.federation.schema import KEPT, kept_layers
from fl_bn.federation.shared_model import SharedModel
from fl_bn.flower.log import log
from fl_bn.flower.population import Client
from fl_bn.flower.wire.codec import header_for, to_records
from fl_bn.flower.wire.fields import add_to_config
from fl_bn.flower.wire.messaging import send_and_receive
from fl_bn.flower.wire.replies import Decoded, Reading, read_replies, with_header
from fl_bn.flower.wire.run_id import RunId
from fl_bn.flower.wire.versions import here
from fl_bn.methods import Phase


def average_kept(
    grid: Grid,
    clients: Sequence[Client],
    shared: SharedModel,
    round: int,
    rounds: Rounds,
    run_id: RunId,
    overheard: Callable[[Iterable[Message]], Iterable[Decoded]],
    note: Callable[[dict[int, str]], None] | None = None,
) -> dict[str, Tensor]:
    """Ask the clients for the tensors that they keep, and return their average, with equal weights.

    Args:
        grid: Flower's grid.
        clients: The clients that have trained.
        shared: The shared model.
        round: The number of the last round.
        rounds: The server's settings for rounds.
        run_id: The id of the run.
        overheard: Decodes the replies, and records for the disclosure report which data they reveal.
        note: Called with the reasons why clients are not in the average, by client index. Default: they are logged.

    Returns:
        The averages by their names in the state_dict; empty if no client sent valid tensors.
    """
    header = header_for(shared, round, Phase.MEASURE)
    samples = {client.index: client.samples for client in clients}
    expected = Expected(round, shared.signature, kept_layers(shared.model, shared.locality), REPLIED, samples)
    content, group = to_records({}, header), str(header.round)
    add_to_config(content, {"version": here(), **run_id.to_config()})
    sent = [Message(RecordDict(dict(content.items())), c.node, f"query.{KEPT}", ttl=rounds.timeout, group_id=group) for c in clients]
    replies = send_and_receive(grid, sent, rounds.timeout, rounds.retry, rounds.called)
    parts, refused, _ = read_replies(overheard(replies), Reading(clients, with_header(header, expected), sent))
    if note is not None:
        note(refused)
    for index, reason in refused.items() if note is None else ():
        log(logging.WARNING, "%s's layers are not in the average for unseen clients: %s", rounds.called.client(index), reason)
    tensors = [part.sections[KEPT] for part in parts]
    if not tensors:
        return {}
    return {name: mean.to(tensors[0][name].dtype) for name, mean in average(tensors, [1.0] * len(tensors)).items()}
