"""The keys of the run config that choose a method and set its options; the others are in ``run_keys``."""

from __future__ import annotations

from dataclasses import dataclass

from fl_bn.methods import METHODS
from fl_bn.methods.fbn import REPORTS
from fl_bn.methods.fbn import TRACKING as FBN_TRACKING
from fl_bn.methods.fedtan import SCHEDULES as FEDTAN_SCHEDULES
from fl_bn.methods.fixbn import FROZEN
from fl_bn.methods.hbn import EVALUATE, PARTIAL
from fl_bn.methods.hbn import TRACKING as HBN_TRACKING
from fl_bn.run.keys import at_least, between, key


@dataclass(frozen=True)
class MethodKeys:
    """The first of the keys, as fields."""

    method: str = key("fbn", "how normalisation is federated", tuple(METHODS))
    freeze_after: int = key(
        -1, "last round before the statistics freeze, any method; -1: never (fixbn, fedtan2: half of the rounds)", ">= -1", at_least(-1)
    )
    freeze_what: str = key("statistics", "fixbn: what freezes: the statistics, the affine parameters, or both", tuple(FROZEN))
    groups: int = key(2, "gn: groups per layer", ">= 1", at_least(1))
    tracking: float = key(
        0.0,
        "hbn, fbn: weight of a round's pooled moments in the shared statistics, at the start; 0: "
        f"{FBN_TRACKING:g} (fbn), {HBN_TRACKING:g} (hbn), {PARTIAL:g} (hbn, fraction below 1)",
        "0..1",
        between(0, 1),
    )
    fbn_momentum: float = key(
        0.0, "fbn: weight of one batch in the shared statistics, as in the paper's Algorithm 2; 0: tracking", "0..1", between(0, 1)
    )
    fbn_report: str = key(
        "first",
        "fbn: moments that clients report: of the first training batch, of a pass over their data before training, or of all batches",
        tuple(REPORTS),
    )
    hbn_lam: float = key(
        0.0, "hbn: weight of a round's pooled moments in the global statistics, as in the paper; 0: tracking", "0..1", between(0, 1)
    )
    hbn_stat_samples: int = key(0, "hbn: samples of the statistics pass; 0: all of the client's", "0 or >= 2", lambda v: v == 0 or v >= 2)
    hbn_lower_layers: str = key("hybrid", "hbn: what lower layers normalise with in the statistics pass", ("shared", "hybrid"))
    hbn_evaluate: str = key(
        "auto",
        "hbn: statistics that are evaluated and saved: exact, of the union of all data (an exchange per layer), or hybrid, as training "
        "normalises (one exchange); auto: exact for hbn-lam=1, else hybrid",
        EVALUATE,
    )
    fedtan_schedule: str = key(
        "merged", "fedtan and its kin: layer-wise exchanges per round of L layers: merged 2L, paper 3L; equal results", FEDTAN_SCHEDULES
    )
