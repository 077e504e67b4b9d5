"""FixBN: FedAvg with BatchNorm, then the statistics are frozen.

Making Batch Normalization Great in Federated Deep Learning, Zhong, Chen, Chao (seed 000), section 4.

Stage I, rounds 1..T*: FedAvg. Stage II: BatchNorm normalises with the aggregated statistics of round T*, which stay bit-identical;
affine parameters and everything else keep training. T* = T is FedAvg.

Symbols: T* -> freeze_after.
"""

from dataclasses import replace

from fl_bn.methods.fedavg import fedavg
from fl_bn.methods.method import Method, freeze


def fixbn(freeze_after: int | None = None) -> Method:
    """``freeze_after``: last round of stage I; None is half of the rounds."""
    return replace(freeze(fedavg(), freeze_after), name="fixbn")
