"""Send clients the start of the tensors that they keep: their BatchNorm then begins as the server's does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flwr.app import ArrayRecord, Message

from fl_bn.federation.payload import nbytes, to_numpy
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.schema import START
from fl_bn.federation.shared_model import SharedModel
from fl_bn.flower.population import Client
from fl_bn.flower.wire.codec import tensors_of, to_record
from fl_bn.flower.wire.fields import OURS
from fl_bn.support.wire import printable


class Starts:
    """Send the starts of one run.

    Clients of an app of one's own build their networks anew, and not from the weights that the server has. So do
    those of fl-bn's application, where a run begins with other arrays than those of its model.

    Args:
        shared: the shared model.
        sends: whether starts are sent.
    """

    def __init__(self, shared: SharedModel, sends: bool = False) -> None:
        self._shared, self._sends = shared, sends
        self._bytes: dict[int, int] = {}  # of the round's starts, by client

    def begin_with(self, arrays: ArrayRecord) -> None:
        """Let the run start from ``arrays``, by the names of the network's state_dict.

        Raises:
            ValueError: an array is of another network, or missing.
        """
        own, tensors = self._shared.model.state_dict(), tensors_of(arrays)
        for name, tensor in tensors.items():
            if name not in own or own[name].shape != tensor.shape:
                here = f"shape {tuple(own[name].shape)}" if name in own else "no such tensor"
                raise ValueError(
                    f"initial_arrays: {printable(name)} has shape {tuple(tensor.shape)}, but the strategy's network has {here}: give "
                    "ArrayRecord(net.state_dict()) of the network that the strategy has"
                )
        if missing := [name for name in self._shared.tensors() if name not in tensors]:
            raise ValueError(f"initial_arrays lack {missing[0]!r}: give ArrayRecord(net.state_dict()) of the strategy's network")
        self._shared.load(tensors)
        self._sends = True

    def add(self, messages: Sequence[Message], clients: Sequence[Client], keeps: Callable[[int], bool]) -> None:
        """Add the start to the messages for those clients who keep nothing yet.

        Args:
            messages: one message for each of ``clients``.
            clients: the addressees.
            keeps: tells whether the client with an index keeps tensors already.
        """
        start = self._shared.start() if self._sends else {}
        self._bytes = {client.index: nbytes(start) for client in clients if start and not keeps(client.index)}
        for message, client in zip(messages, clients, strict=True):
            if client.index in self._bytes:
                message.content[OURS + START] = to_record(to_numpy(start[START]))

    def counted(self, record: RoundRecord) -> RoundRecord:
        """Return the round's ``record`` with the bytes of its starts."""
        if not self._bytes:
            return record
        down = {**record.bytes_down, START: max(self._bytes.values())}
        clients = [replace(c, bytes_down=c.bytes_down + self._bytes.get(c.client, 0)) for c in record.clients]
        return replace(record, bytes_down=down, clients=clients)
