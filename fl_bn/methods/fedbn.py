"""Define FedBN: every BatchNorm tensor stays on its client.

FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, Li et al., ICLR 2021,
Algorithm 1.

The method is for feature shift (the same classes, photographed differently). Each client has a model of its own:
shared weights, local BatchNorm.
"""

from fl_bn.bn.roles import OF_BATCH_NORM
from fl_bn.methods.method import Method


def fedbn() -> Method:
    """Make the method FedBN: all BatchNorm tensors stay at their client. It has no options."""
    return Method("fedbn", local=OF_BATCH_NORM)
