"""Define SingleSet: every client trains alone, and nothing is shared.

It is a baseline in FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, Li et al., ICLR 2021, section 5.
"""

from fl_bn.bn.roles import Role
from fl_bn.methods.method import Method


def single() -> Method:
    """Make SingleSet: every client trains alone, and nothing is shared. It has no options."""
    return Method("single", local=frozenset(Role))
