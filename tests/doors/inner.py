"""The inner names that tests of the doors need: objects that are given to a door or returned by it, and have no public name."""

# ruff: noqa: F401
from __future__ import annotations

from fl_bn.app.config import RunConfig
from fl_bn.bn.derived import derivation
from fl_bn.bn.kinds import Unconvertible
from fl_bn.bn.roles import batch_norms, roles
from fl_bn.cli.main import app
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.aggregation import Defence
from fl_bn.federation.contract import ContractBroken
from fl_bn.federation.federation import Diverged
from fl_bn.federation.gradients import centred_weights
from fl_bn.federation.local import Samples, evaluate, generators
from fl_bn.federation.optimizers import SERVER_OPTIMIZERS, server_optimizer
from fl_bn.federation.schema import START
from fl_bn.federation.values import ClientState
from fl_bn.models.weights import load_weights
from fl_bn.support.durable import Damaged
