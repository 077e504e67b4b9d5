"""Parts of the server's and the clients' arithmetic that have no public name, imported once for the tests of this folder."""

from __future__ import annotations

from fl_bn.bn.moments import Average, Moments, Running, plain_average, pool, weighted_mean
from fl_bn.bn.roles import batch_norms, roles
from fl_bn.data.dataset import to_input
from fl_bn.federation.aggregation import NO_DEFENCE, Defence, Drift, TooFew, average, combine, difference, running_statistics
from fl_bn.federation.local import Samples, evaluate, statistics_pass, torch_seed
from fl_bn.federation.optimizers import SERVER_OPTIMIZERS, ServerOptimizer, server_optimizer
from fl_bn.federation.policy import ServerPolicy
from fl_bn.federation.recalibration import TOLERANCE, Pass, epsilons, recalibrate, why_not
from fl_bn.federation.record import named_series, over_clients, series
from fl_bn.federation.server import Server
from fl_bn.federation.settings import LocalTraining, Schedule, milestones_of, seeded
from fl_bn.federation.values import Reply, RoundReplies
from fl_bn.models import build

__all__ = [
    "NO_DEFENCE", "SERVER_OPTIMIZERS", "TOLERANCE", "Average", "Defence", "Drift", "LocalTraining", "Moments", "Pass", "Reply",
    "RoundReplies", "Running", "Samples", "Schedule", "Server", "ServerOptimizer", "ServerPolicy", "TooFew", "average", "batch_norms",
    "build", "combine", "difference", "epsilons", "evaluate", "milestones_of", "named_series", "over_clients",
    "plain_average", "pool", "recalibrate", "roles", "running_statistics", "seeded", "series", "server_optimizer", "statistics_pass",
    "to_input", "torch_seed", "weighted_mean", "why_not",
]  # fmt: skip
