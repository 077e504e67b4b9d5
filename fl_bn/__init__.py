"""Make batch normalisation work in federated learning, for any PyTorch network.

There are three ways to use it. ``Federation`` is for plain torch. ``local_round``
and ``server_round`` are for a training loop of your own. ``fl_bn.flower`` is for a
Flower app of your own. docs/start has a page for each, and examples/ has files to
copy.

>>> import fl_bn
>>> fl_bn.methods.fixbn().name
'fixbn'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_bn import methods
    from fl_bn.bn.conversion import convert
    from fl_bn.bn.kinds import register_batch_norm
    from fl_bn.bn.roles import set_buffer_roles
    from fl_bn.federation.arguments import per_client
    from fl_bn.federation.callbacks import Callback, EarlyStop, KeepBest
    from fl_bn.federation.federation import Federation
    from fl_bn.federation.loaders import SeededBatches
    from fl_bn.federation.own_loop import client_model, local_round, server_round, server_state
    from fl_bn.federation.recording import unrecorded
    from fl_bn.task import Classification, Dice, MultiLabel, Regression, Segmentation, Task

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Classification",
    "Dice",
    "EarlyStop",
    "Federation",
    "KeepBest",
    "MultiLabel",
    "Regression",
    "SeededBatches",
    "Segmentation",
    "Task",
    "__version__",
    "client_model",
    "convert",
    "local_round",
    "methods",
    "per_client",
    "register_batch_norm",
    "server_round",
    "server_state",
    "set_buffer_roles",
    "unrecorded",
]

_HOMES = {
    "Callback": "fl_bn.federation.callbacks",
    "EarlyStop": "fl_bn.federation.callbacks",
    "KeepBest": "fl_bn.federation.callbacks",
    "client_model": "fl_bn.federation.own_loop",
    "convert": "fl_bn.bn.conversion",
    "local_round": "fl_bn.federation.own_loop",
    "Federation": "fl_bn.federation.federation",
    "SeededBatches": "fl_bn.federation.loaders",
    "per_client": "fl_bn.federation.arguments",
    "register_batch_norm": "fl_bn.bn.kinds",
    "server_round": "fl_bn.federation.own_loop",
    "server_state": "fl_bn.federation.own_loop",
    "set_buffer_roles": "fl_bn.bn.roles",
    "unrecorded": "fl_bn.federation.recording",
    **dict.fromkeys(("Classification", "Dice", "MultiLabel", "Regression", "Segmentation", "Task"), "fl_bn.task"),
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use.

    Torch takes seconds to import, and commands such as ``fl-bn start`` do not need
    it.
    """
    if name == "methods":
        return import_module("fl_bn.methods")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
