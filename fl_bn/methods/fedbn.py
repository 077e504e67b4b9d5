"""Define the methods whose clients keep layers: FedBN, SiloBN, FedLBN and SingleSet.

FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, Li et
al., ICLR 2021, Algorithm 1, for feature shift (the same classes, photographed
differently). SingleSet is its baseline (section 5), which keeps all layers.

SiloBN: Siloed Federated Learning for Multi-Centric Histopathology Datasets, Andreux
et al., DCL 2020.

FedLBN: the first BatchNorm layer stays at its client, the others are FBN's. Clients
whose inputs look different (other cameras, other scanners) differ most in the first
layer's statistics. With shared statistics, the layers above do not depend on a
client's labels.
"""

from collections.abc import Sequence
from dataclasses import replace

from fl_bn.bn.roles import OF_BATCH_NORM, Role
from fl_bn.methods.fbn import FBNOptions, fbn
from fl_bn.methods.method import Method
from fl_bn.options import takes


def fedbn() -> Method:
    """Make FedBN: all BatchNorm tensors stay at their client. It has no options."""
    return Method("fedbn", local=OF_BATCH_NORM)


def silobn() -> Method:
    """Make SiloBN: running statistics stay at their client, affine parameters are shared."""
    return Method("silobn", local=OF_BATCH_NORM - {Role.AFFINE}, needs_running=True)


def single() -> Method:
    """Make SingleSet: every client trains alone. It has no options."""
    return Method("single", local=frozenset(Role))


def first_layer(layers: Sequence[str]) -> dict[str, frozenset[Role]]:
    """Return all roles of the network's first BatchNorm layer."""
    return {layers[0]: OF_BATCH_NORM}


@takes(FBNOptions)
def fedlbn(options: FBNOptions) -> Method:
    """Make FedLBN: the first BatchNorm layer stays at its client, the others are ``fbn``'s."""
    return replace(fbn(options.tracking, options.momentum, options.report), name="fedlbn", local_in=first_layer)
