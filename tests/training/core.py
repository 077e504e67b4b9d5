"""Parts of the server's and the clients' arithmetic that have no public name, imported once for the tests of this folder."""

# ruff: noqa: F401

from __future__ import annotations

from fl_bn.bn.moments import Moments, Running, plain_average, pool, weighted_mean
from fl_bn.bn.roles import batch_norms, roles
from fl_bn.data.dataset import to_input
from fl_bn.federation.aggregation import NO_DEFENCE, Defence, Drift, TooFew, average, combine, difference, running_statistics
from fl_bn.federation.local import Samples, evaluate, statistics_pass, torch_seed
from fl_bn.federation.optimizers import server_optimizer
from fl_bn.federation.policy import ServerPolicy
from fl_bn.federation.recalibration import epsilons, recalibrate, why_not
from fl_bn.federation.record import named_series, over_clients, series
from fl_bn.federation.server import Server
from fl_bn.federation.settings import LocalTraining, Schedule, milestones_of, seeded
from fl_bn.federation.values import Reply, RoundReplies
from fl_bn.models import build
