"""Define the methods whose clients keep layers of their own: FedBN, SiloBN and, with all layers, SingleSet.

FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, Li et al., ICLR 2021, Algorithm
1, for feature shift (the same classes, photographed differently). SingleSet is a baseline in its section 5.

SiloBN: Siloed Federated Learning for Multi-Centric Histopathology Datasets, Andreux et al., DCL 2020.
"""

from fl_bn.bn.roles import OF_BATCH_NORM, Role
from fl_bn.methods.method import Method


def fedbn() -> Method:
    """Make the method FedBN: all BatchNorm tensors stay at their client. It has no options."""
    return Method("fedbn", local=OF_BATCH_NORM)


def silobn() -> Method:
    """Make the method SiloBN: running statistics stay at their client, affine parameters are shared."""
    return Method("silobn", local=OF_BATCH_NORM - {Role.AFFINE}, needs_running=True)


def single() -> Method:
    """Make SingleSet: every client trains alone, and nothing is shared. It has no options."""
    return Method("single", local=frozenset(Role))
