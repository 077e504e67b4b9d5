"""Connect fl-bn to Flower: strategies, the client, the wire format and the in-process engine.

No other package of fl-bn imports Flower.
"""

from fl_bn.federation.policy import ServerPolicy
from fl_bn.flower.in_process import InProcessGrid, run_in_process
from fl_bn.flower.legacy import legacy_client_app, legacy_server_app
from fl_bn.flower.local_client import BatchNormClient, Site, make_client_app
from fl_bn.flower.own_app import answer, evaluating, replayed, training
from fl_bn.flower.population import RunFailed
from fl_bn.flower.strategies import FBN, HBN, FedAvgBN, FedBN, FedTAN, FedTAN2, FixBN, OwnAppStrategy, SiloBN
from fl_bn.flower.strategy import BatchNormStrategy
from fl_bn.flower.wire.gate import Gate

Rounds = ServerPolicy  # its name before

__all__ = [
    "FBN",
    "HBN",
    "FedAvgBN",
    "FedBN",
    "FedTAN",
    "FedTAN2",
    "FixBN",
    "OwnAppStrategy",
    "SiloBN",
    "answer",
    "evaluating",
    "legacy_client_app",
    "legacy_server_app",
    "replayed",
    "training",
    "BatchNormClient",
    "BatchNormStrategy",
    "Gate",
    "InProcessGrid",
    "Rounds",
    "RunFailed",
    "ServerPolicy",
    "Site",
    "make_client_app",
    "run_in_process",
]
