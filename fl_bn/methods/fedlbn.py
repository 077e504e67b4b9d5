"""Define FedLBN: the first BatchNorm layer stays at its client, as in FedBN, the others are FBN's.

Clients whose inputs look different (other cameras, other scanners) differ most in the first layer's
statistics. The layers above normalise with the shared statistics, so they do not depend on a
client's labels. For the papers see ``fedbn`` and ``fbn``.
"""

from dataclasses import replace

from fl_bn.bn.roles import OF_BATCH_NORM, Role
from fl_bn.methods.fbn import FBNOptions, fbn
from fl_bn.methods.method import Method
from fl_bn.options import takes


def first_layer(layer: str, index: int) -> frozenset[Role]:
    """Return all roles for the network's first BatchNorm layer, and none for the others."""
    return OF_BATCH_NORM if index == 0 else frozenset()


@takes(FBNOptions)
def fedlbn(options: FBNOptions) -> Method:
    """Make the method FedLBN: the first BatchNorm layer stays at its client, the others are ``fbn``'s."""
    return replace(fbn(options.tracking, options.momentum, options.report), name="fedlbn", local_in=first_layer)
