"""Average vectors over a cohort, layer by layer, in a forward or backward pass.

A carrier (transport) is a gRPC service, replay in Flower messages, or threads in
one process.
"""

from fl_bn.exchange.call import Layer
from fl_bn.exchange.local import LocalExchange, Turns, admit, dismiss
from fl_bn.exchange.session import Session

__all__ = ["Layer", "LocalExchange", "Session", "Turns", "admit", "dismiss"]
