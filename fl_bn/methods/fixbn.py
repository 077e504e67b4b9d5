"""Define FixBN: FedAvg with BatchNorm, then with frozen statistics.

Making Batch Normalization Great in Federated Deep Learning, Zhong, Chen, Chao,
section 4.

Stage I, rounds 1..T*, is FedAvg. In stage II, BatchNorm normalises with the
aggregated statistics of round T*, which stay bit-identical. All parameters are
still trained.

With batch statistics, a sample's gradient depends on the other samples of the
client's batch (section 3.5, equation 4), so it is biased even with one local step.

The paper freezes when it divides the learning rate by ten (section 5). At the full
rate the network collapses after the freeze. So by default, the rate of frozen
rounds is at most a tenth of the highest rate before, or ``BOUNDED_FROZEN_RATE`` of
it in bounded training (``Method``).

Symbols: T* -> freeze_after.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from fl_bn.bn.roles import Role
from fl_bn.methods.fedavg import fedavg
from fl_bn.methods.method import Method, freeze, freeze_after, frozen_rate
from fl_bn.options import Options, option, takes

FROZEN = {
    "statistics": frozenset({Role.STATISTIC}),
    "affine": frozenset({Role.AFFINE}),
    "both": frozenset({Role.STATISTIC, Role.AFFINE}),
}


@dataclass(frozen=True)
class FixBNOptions(Options):
    """Hold the options of ``fixbn``."""

    name: ClassVar[str] = "fixbn"
    freeze_after: int | None = freeze_after()
    freeze_what: str = option(
        "statistics", "what freezes: the statistics, the affine parameters, or both", FROZEN, key="freeze-what", hidden=True
    )
    frozen_rate: float | None = frozen_rate()


@takes(FixBNOptions)
def fixbn(options: FixBNOptions) -> Method:
    """Make FixBN: FedAvg in stage I, then (stage II) frozen BatchNorm.

    ``freeze_after`` is the last round of stage I. Table H of the paper compares the
    values of ``freeze_what``. ``frozen_rate`` limits the learning rate in stage II,
    as a share of stage I's highest.
    """
    what = FROZEN[options.freeze_what]
    return replace(freeze(fedavg(), options.freeze_after, what, options.frozen_rate), name="fixbn")
