"""Define the methods, one file per paper. ``METHODS`` maps a method's name to its constructor.

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
from fl_bn.methods.fedbn import fedbn, silobn, single
from fl_bn.methods.fedlbn import fedlbn
from fl_bn.methods.fedtan import fedavg_alg2, fedtan, fedtan2
from fl_bn.methods.fixbn import fixbn
from fl_bn.methods.hbn import hbn
from fl_bn.methods.method import (
    COHORT,
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
from fl_bn.methods.normalisers import gn, gn_ws, instance, ln
from fl_bn.methods.static_bn import static_bn
from fl_bn.methods.unnormalised import fedfn, fedwon, fixup

METHODS: dict[str, Callable[..., Method]] = {
    "fedavg": fedavg,
    "gn": gn,
    "ln": ln,
    "in": instance,
    "gn-ws": gn_ws,
    "fixup": fixup,
    "fedfn": fedfn,
    "fedwon": fedwon,
    "static-bn": static_bn,
    "single": single,
    "fixbn": fixbn,
    "fedbn": fedbn,
    "silobn": silobn,
    "hbn": hbn,
    "fbn": fbn,
    "fedlbn": fedlbn,
    "fedtan": fedtan,
    "fedtan2": fedtan2,
    "fedavg-alg2": fedavg_alg2,
}

__all__ = [
    "COHORT",
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
