"""Exchange vectors layer by layer: clients average a vector over their cohort during a forward or backward pass.

``call`` defines the operation and ``session`` the server's half. A carrier, that is, a transport, takes requests to the
server and answers back. There are three carriers: a gRPC service, replay in Flower messages, and threads in one process.
"""

from fl_bn.exchange.call import Layer
from fl_bn.exchange.local import LocalExchange, Turns, admit, dismiss
from fl_bn.exchange.session import Session

__all__ = ["Layer", "LocalExchange", "Session", "Turns", "admit", "dismiss"]
