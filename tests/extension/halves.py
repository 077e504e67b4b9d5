"""A user's own method: FBN with a constant weight per round.

``tests/extension/test_additions.py`` copies this file into a package.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fl_bn.bn.layers import FederatedBatchNorm
from fl_bn.bn.moments import Running, ema, pool
from fl_bn.methods import METHODS, LayerReports, Method, StatisticsReport
from fl_bn.options import Options, option, takes

REPORTS = {"first": StatisticsReport.FIRST, "pass": StatisticsReport.PASS}


@dataclass(frozen=True)
class HalvesOptions(Options):
    name: ClassVar[str] = "halves"
    weight: float = option(0.5, "weight of a round's pooled moments (h in the paper)", "(0, 1]")
    report: str = option("first", "moments that clients report", REPORTS)


def combine(reports: LayerReports, weight: float) -> Running:
    return ema(reports.shared, pool(reports.parts, reports.average), weight)


@takes(HalvesOptions)
def halves(options: HalvesOptions) -> Method:
    return Method(
        "halves",
        layer=FederatedBatchNorm.from_batch_norm,
        report=REPORTS[options.report],
        combine=partial(combine, weight=options.weight),
        calibrate=True,
        constant=True,
    )


METHODS["halves"] = halves
