"""Define FedAvg with BatchNorm, the baseline.

Communication-Efficient Learning of Deep Networks from Decentralized Data, McMahan
et al., AISTATS 2017.

Clients normalise with their own batches. The server averages the running means and,
separately, the variances. Counters (``num_batches_tracked``) are not averaged.
"""

from fl_bn.bn.moments import Running, plain_average
from fl_bn.methods.method import LayerReports, Method, StatisticsReport


def combine(reports: LayerReports) -> Running:
    """Average the clients' running means and, separately, variances."""
    average = plain_average(reports.parts, reports.average)
    return Running(average.mean, average.var)


def fedavg() -> Method:
    """Make FedAvg with BatchNorm, the baseline. It has no options."""
    return Method("fedavg", report=StatisticsReport.RUNNING, combine=combine)
