"""Define SiloBN: the running statistics stay on their client, scale and shift are shared.

Siloed Federated Learning for Multi-Centric Histopathology Datasets, Andreux et al., DCL 2020.
"""

from fl_bn.bn.roles import OF_BATCH_NORM, Role
from fl_bn.methods.method import Method


def silobn() -> Method:
    """Make the method SiloBN: running statistics stay at their client, affine parameters are shared. It has no options."""
    return Method("silobn", local=OF_BATCH_NORM - {Role.AFFINE}, needs_running=True)
