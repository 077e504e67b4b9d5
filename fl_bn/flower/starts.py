"""Send clients the initial values of the tensors that they keep, so that their BatchNorm layers start from the server's values."""

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
    """Send clients the initial values of the tensors that stay at the clients, in one run.

    In a user's own Flower app, a client builds a new network, whose initial weights differ from the server's.
    The same happens in fl-bn's application if a run starts from other arrays than those of its model.

    Args:
        shared: the shared model.
        sends: whether initial values are sent. False: they are sent only after a call of ``begin_with``.
    """

    def __init__(self, shared: SharedModel, sends: bool = False) -> None:
        self._shared, self._sends = shared, sends
        self._bytes: dict[int, int] = {}  # client -> the bytes of the initial values that it got in this round

    def begin_with(self, arrays: ArrayRecord) -> None:
        """Load ``arrays`` into the shared model, so that the run starts from them, and send clients their initial values.

        Args:
            arrays: the tensors by the names of the network's state_dict.

        Raises:
            ValueError: an array is missing, or the network has no tensor of an array's name and shape.
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
        """Add the initial values to the messages for clients that keep no tensors yet.

        Args:
            messages: one message for each of ``clients``.
            clients: the addressees.
            keeps: returns, for a client's index, whether this client has stored tensors of its own already.
        """
        start = self._shared.start() if self._sends else {}
        self._bytes = {client.index: nbytes(start) for client in clients if start and not keeps(client.index)}
        for message, client in zip(messages, clients, strict=True):
            if client.index in self._bytes:
                message.content[OURS + START] = to_record(to_numpy(start[START]))

    def counted(self, record: RoundRecord) -> RoundRecord:
        """Return ``record`` with the bytes of this round's initial values added to the bytes that went to the clients."""
        if not self._bytes:
            return record
        down = {**record.bytes_down, START: max(self._bytes.values())}
        clients = [replace(c, bytes_down=c.bytes_down + self._bytes.get(c.client, 0)) for c in record.clients]
        return replace(record, bytes_down=down, clients=clients)
