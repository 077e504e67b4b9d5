"""Define the methods, one file per paper. ``METHODS`` maps names to constructors.

>>> from fl_bn import methods
>>> methods.hbn(lam=0.05).name
'hbn'
>>> methods.METHODS["fixbn"](freeze_after=10).phase(11, 20).value
'frozen'
"""

from collections.abc import Callable

from fl_bn.bn.roles import Role
from fl_bn.methods.fbn import fbn
from fl_bn.methods.fedavg import fedavg
from fl_bn.methods.fedbn import fedbn, fedlbn, silobn, single
from fl_bn.methods.fedtan import fedavg_alg2, fedtan, fedtan2
from fl_bn.methods.fixbn import fixbn
from fl_bn.methods.hbn import hbn
from fl_bn.methods.method import (
    INPUTS,
    MEASURED,
    MOMENTS,
    NORMALISERS,
    OBSERVED,
    LayerReports,
    Method,
    Phase,
    Place,
    Refresh,
    StatisticsPass,
    StatisticsReport,
    attacked,
    freeze,
    replace_by_pooled,
)
from fl_bn.methods.normalisers import gn, gn_ws, instance, ln, static_bn
from fl_bn.methods.unnormalised import fedfn, fedwon, fixup

Constructor = Callable[..., Method]
BASELINES: tuple[Constructor, ...] = (fedavg, gn, ln, instance, gn_ws, fixup, fedfn, fedwon, static_bn, single)
FEDERATED: tuple[Constructor, ...] = (fixbn, fedbn, silobn, hbn, fbn, fedlbn, fedtan, fedtan2, fedavg_alg2)
METHODS = {make().name: make for make in (*BASELINES, *FEDERATED)}

__all__ = [
    "INPUTS",
    "MEASURED",
    "METHODS",
    "MOMENTS",
    "NORMALISERS",
    "OBSERVED",
    "LayerReports",
    "Method",
    "Phase",
    "Place",
    "Refresh",
    "Role",
    "StatisticsReport",
    "StatisticsPass",
    "attacked",
    "freeze",
    "replace_by_pooled",
]
