# ruff: noqa: F401  # inner names, which the tests of this folder import from here
"""Names of the product's inner modules that tests of this folder need. They are imported here alone, so that a move changes one file."""

from collections.abc import Callable

from torch import nn

from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.aggregation import Defence, running_statistics
from fl_bn.federation.local import Samples
from fl_bn.federation.network import Network
from fl_bn.federation.record import Disclosure, RoundRecord
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.values import Payload, to_numpy, to_tensors
from fl_bn.flower.compat import find
from fl_bn.flower.recovery import Checkpoint
from fl_bn.flower.wire.codec import Header, RunId, header_of, payload_of, to_records
from fl_bn.flower.wire.codec import arrays_of as arrays_record
from fl_bn.methods import Method
from fl_bn.secure.settings import SecureAggregation
from fl_bn.support.flower_config import PROGRESS

Clients = Callable[..., list[Samples]]


def signature(model: nn.Module, method: Method) -> str:
    return Network(model, method).signature
