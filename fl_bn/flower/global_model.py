"""Make the model that ``evaluate_fn`` gets, and the average of the layers that stay at the clients.

The arrays load into the user's own network by ``load_state_dict``. Clients that took no part in the training may start from the average
(Li et al.: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021, appendix G).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, Message, RecordDict
from torch import Tensor

from fl_bn.bn.roles import Role, batch_norms
from fl_bn.federation.aggregation import average
from fl_bn.federation.payload import Named
from fl_bn.federation.record import batches_trained
from fl_bn.federation.replies import REPLIED, Expected
from fl_bn.federation.schema import KEPT, kept_layers
from fl_bn.flower.compat import log
from fl_bn.flower.wire.codec import arrays_of, header_for, to_records
from fl_bn.flower.wire.fields import add_to_config
from fl_bn.flower.wire.messaging import send_and_receive
from fl_bn.flower.wire.replies import CheckedReading, read_replies
from fl_bn.flower.wire.versions import here
from fl_bn.methods import Phase, Place

if TYPE_CHECKING:
    from fl_bn.flower.grid_transport import GridTransport

NO_MODEL = (
    "evaluate_fn is not called from round %d on: under %s every client keeps its BatchNorm, so there is no global model. %s. Clients may "
    "send their BatchNorm layers for an average: answer(..., tells=True) in client_app.py (in fl-bn's application: unseen-client = true)"
)
AVERAGED = "evaluate_fn gets a model with the average of the clients' BatchNorm (%s), since every client keeps its own under %s"
NOTHING_SHARED = "evaluate_fn is not called from round %d on: under %s clients share no weights, so there is no global model"
CONVERTED = "evaluate_fn gets the arrays of the converted network, since %s replaces BatchNorm: load them into fl_bn.convert(Net(), method)"
OWN_VALUES = "evaluate_fn gets the server's own values of %s (%d tensors), since every client keeps its own"


class GlobalModel:
    """Make the arrays of one run's global model, and log once what they contain.

    Args:
        transport: the run's transport.
    """

    def __init__(self, transport: GridTransport) -> None:
        self._transport, self._none, self._said = transport, False, set[str]()

    def at(self, number: int, tensors: Named) -> ArrayRecord | None:
        """Return the arrays after a round; None if there is no global model. The log then says why.

        Args:
            number: the round. 0: before round 1, when every client starts with these tensors.
            tensors: the shared tensors, by name.
        """
        run = self._transport
        shared, method, locality = run.shared, run.method, run.shared.locality
        state = shared.model.state_dict()
        others = {name: state[name] for name in locality.names(Place.HOME) if locality.role[name] is not Role.MIXING}
        if batch_norms(run.server.source) and not locality.norm_layers:
            self._say(CONVERTED % method.name)
        if number and method.keeps(Role.WEIGHT):
            self._say(NOTHING_SHARED % (number, method.name), once="nothing is shared")
            return None
        if number and method.personal and others:
            if (mean := self._average(number)) is None:
                return None
            others |= mean
        if number and (kept := locality.names(Place.HOME, of=[Role.KEPT])):
            self._say(OWN_VALUES % (kept[0], len(kept)))
        batches = run.batches_trained + (batches_trained([run.record]) if number else 0)
        return arrays_of(shared.whole({**tensors, **others}, batches, others))

    def _average(self, number: int) -> Mapping[str, Tensor] | None:
        run, refused, mean = self._transport, dict[int, str](), dict[str, Tensor]()
        if self._none:
            return None
        clients = run.with_models(run.everyone())
        if run.secure is None:
            mean = average_kept(run, number, refused.update)
        if not mean:
            self._none = True
            reasons = [f"{run.policy.called.client(index)}: {reason}" for index, reason in sorted(refused.items())]
            why = "Secure aggregation hides each client's layers" if run.secure else [*reasons, "No client is online"][0]
            log(logging.WARNING, NO_MODEL, number, run.method.name, why)
            return None
        self._say(AVERAGED % (f"{len(clients) - len(refused)} of {len(clients)} clients sent theirs", run.method.name))
        return mean

    def _say(self, line: str, once: str = "") -> None:
        """Log ``line``, unless it, or a line with the same ``once``, was logged before."""
        if (once or line) not in self._said:
            self._said.add(once or line)
            log(logging.INFO, "%s", line)


def average_kept(run: GridTransport, number: int, note: Callable[[dict[int, str]], None] | None = None) -> dict[str, Tensor]:
    """Ask the clients for the tensors that they keep, and return their average, with equal weights.

    Args:
        run: the run's transport.
        number: the last round.
        note: called with the reasons why clients are not in the average, by client index. Default: they are logged.

    Returns:
        The averages by their names in the state_dict; empty if no client sent valid tensors.
    """
    shared, policy, clients = run.shared, run.policy, run.with_models(run.everyone())
    header = header_for(shared, number, Phase.MEASURE)
    samples = {client.index: client.samples for client in clients}
    expected = Expected(number, shared.signature, kept_layers(shared.model, shared.locality), REPLIED, samples)
    content, group = to_records({}, header), str(header.round)
    add_to_config(content, {"version": here(), **run.recovery.run_id.to_config()})
    sent = [Message(RecordDict(dict(content.items())), c.node, f"query.{KEPT}", ttl=policy.timeout, group_id=group) for c in clients]
    replies = send_and_receive(run.grid, sent, policy.timeout, policy.retry, policy.called)
    parts, refused, _ = read_replies(run.overheard(replies), CheckedReading(clients, header, expected, sent=sent))
    if note is not None:
        note(refused)
    for index, reason in refused.items() if note is None else ():
        log(logging.WARNING, "%s's layers are not in the average for unseen clients: %s", policy.called.client(index), reason)
    tensors = [part.sections[KEPT] for part in parts]
    if not tensors:
        return {}
    return {name: mean.to(tensors[0][name].dtype) for name, mean in average(tensors, [1.0] * len(tensors)).items()}
