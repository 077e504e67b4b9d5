"""Provide one strategy per method for a Flower app of your own, with Flower's own arguments and the method's options.

    strategy = FixBN(Net(), freeze_after=10, fraction_train=0.5)
    result = strategy.start(grid, initial_arrays, num_rounds=20, train_config=ConfigRecord({"lr": 0.1}))

The strategies are classes. A subclass may override their hooks, as with Flower's ``FedAvg``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from fl_bn.flower.own.strategy import OwnAppStrategy
from fl_bn.methods import METHODS
from fl_bn.options import options_by_key

OPTIONS = frozenset(OwnAppStrategy.__init__.__kwdefaults__ or {})


class OwnOfMethod(OwnAppStrategy):
    """Train by one method over a Flower app of your own.

    Args:
        model: your network, unconverted.
        options: the method's options (``fl_bn.methods``), and the arguments of ``OwnAppStrategy``, by name.
    """

    of: ClassVar[str]

    def __init__(self, model: nn.Module, **options: Any) -> None:
        own = {name: options.pop(name) for name in [*options] if name in OPTIONS}
        if "fraction" in options_by_key(METHODS[self.of]) and "fraction_train" in own:  # HBN tracks more slowly with a part of the clients
            options.setdefault("fraction", own["fraction_train"])
        super().__init__(model, METHODS[self.of](**options), **own)


class FedAvgBN(OwnOfMethod):
    """Run FedAvg, the baseline: the server averages the running means and, separately, the running variances.

    Args:
        model: your network, unconverted.
        options: the options of ``fedavg`` (``fl_bn.methods``), and the arguments of ``OwnAppStrategy``, by name.
    """

    of = "fedavg"


class FixBN(OwnOfMethod):
    """Run FixBN: the statistics are frozen after round ``freeze_after``.

    Args:
        model: your network, unconverted.
        options: the options of ``fixbn`` (``fl_bn.methods``), and the arguments of ``OwnAppStrategy``, by name.
    """

    of = "fixbn"


class FedBN(OwnOfMethod):
    """Run FedBN: all BatchNorm tensors stay at their client.

    Args:
        model: your network, unconverted.
        options: the options of ``fedbn`` (``fl_bn.methods``), and the arguments of ``OwnAppStrategy``, by name.
    """

    of = "fedbn"


class SiloBN(OwnOfMethod):
    """Run SiloBN: running statistics stay at their client, scale and shift are shared.

    Args:
        model: your network, unconverted.
        options: the options of ``silobn`` (``fl_bn.methods``), and the arguments of ``OwnAppStrategy``, by name.
    """

    of = "silobn"


class HBN(OwnOfMethod):
    """Run HBN: layers normalise by a learnable mix of batch statistics and pooled global statistics.

    Args:
        model: your network, unconverted.
        options: the options of ``hbn`` (``fl_bn.methods``), and the arguments of ``OwnAppStrategy``, by name.
    """

    of = "hbn"


class FBN(OwnOfMethod):
    """Run FBN: clients train with shared running statistics, corrected for the spread of the clients' means.

    Args:
        model: your network, unconverted.
        options: the options of ``fbn`` (``fl_bn.methods``), and the arguments of ``OwnAppStrategy``, by name.
    """

    of = "fbn"


class FedTAN(OwnOfMethod):
    """Run FedTAN: the first local step of every round equals a step of centralised training.

    Args:
        model: your network, unconverted.
        options: the options of ``fedtan`` (``fl_bn.methods``), and the arguments of ``OwnAppStrategy``, by name.
    """

    of = "fedtan"


class FedTAN2(OwnOfMethod):
    """Run FedTAN-II: FedTAN up to round ``freeze_after``, then the statistics are frozen.

    Args:
        model: your network, unconverted.
        options: the options of ``fedtan2`` (``fl_bn.methods``), and the arguments of ``OwnAppStrategy``, by name.
    """

    of = "fedtan2"
