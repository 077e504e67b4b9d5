"""Run a client of Flower's older API, a ``NumPyClient``, in the rounds of an fl-bn strategy.

In client_app.py, ``app = ClientApp(client_fn)`` becomes::

    app = legacy_client_app(client_fn, fixbn())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from torch import nn
from torch.optim import Optimizer

from fl_bn.flower.own.app import answers, evaluating, replayed, training
from fl_bn.flower.own.metrics import EXAMPLES
from fl_bn.flower.wire.gate import OWN_METRICS
from fl_bn.methods import Method
from fl_bn.task import CLASSIFICATION, Task

SCALARS = "scalars"
"""The record with all metrics that a legacy client returned. It may hold text, too, which a MetricRecord cannot."""
CONFIG = "config"
LOSSES = ("loss", "train_loss")
ClientFn = Callable[[Context], Any]


def legacy_client_app(
    client_fn: ClientFn,
    method: Method,
    *,
    net: str = "net",
    trainloader: str = "trainloader",
    task: Task = CLASSIFICATION,
    tells: bool = False,
    mods: Sequence[Any] = (),
) -> ClientApp:
    """Return the ClientApp of a legacy ``client_fn``, whose clients train and evaluate by ``method``.

    The clients' class needs no change. In every round, the client's network is replaced by the network of the
    round. ``fit`` gets the arrays of this network, and the arrays that ``fit`` returns are used.

    Args:
        client_fn: makes a ``NumPyClient`` from Flower's context, with or without ``.to_client()``.
        method: the method, the same as the server's.
        net: the name of the client's attribute that holds its network.
        trainloader: the name of the client's attribute that holds its training batches.
        task: splits a batch into inputs and targets, if the method measures the batches.
        tells: whether the client sends the BatchNorm layers that it keeps, as in ``answer``.
        mods: Flower's mods for the app.

    Returns:
        The app for client_app.py.
    """
    app = ClientApp(mods=[*mods])

    def client_of(context: Context) -> Any:
        return checked_client(client_fn(context), net, trainloader)

    @app.train(mods=[replayed])
    def train(message: Message, context: Context) -> Message:
        return _fit(message, context, client_of(context), net, trainloader, method, task)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _evaluate(message, context, client_of(context), net, method)

    answers(app, lambda c: getattr(client_of(c), net), method, lambda c: getattr(client_of(c), trainloader), task=task, tells=tells)
    return app


def checked_client(made: Any, net: str, trainloader: str) -> Any:
    """Return the ``NumPyClient`` that a ``client_fn`` made, if fl-bn can run it.

    Args:
        made: what ``client_fn`` returned.
        net: the name of the attribute that holds the network.
        trainloader: the name of the attribute that holds the training batches.

    Raises:
        TypeError: ``made`` is no ``NumPyClient``.
        ValueError: an attribute is missing, or the client made its optimizer in its constructor. Each round replaces the
            network, so such an optimizer would update a network that is no longer used.
    """
    client = getattr(made, "numpy_client", made)
    if not isinstance(client, NumPyClient):
        raise TypeError(
            f"client_fn must return a NumPyClient, or its to_client(), but returned a {type(made).__name__}: for another kind of client "
            "write handlers with fl_bn.flower.training (docs/start/flower-app.md)"
        )
    kind, own = type(client).__name__, getattr(client, "__dict__", {})
    if not isinstance(getattr(client, net, None), nn.Module):
        found = [name for name, value in own.items() if isinstance(value, nn.Module)]
        raise ValueError(
            f"{kind} has no network in its attribute {net!r} (networks are in: {', '.join(found) or 'none'}): "
            f"call legacy_client_app(client_fn, method, net={found[0] if found else 'NAME'!r})"
        )
    if not hasattr(client, trainloader):
        raise ValueError(
            f"{kind} has no attribute {trainloader!r} (it has: {', '.join(own)}): name the one with the training batches, "
            "legacy_client_app(client_fn, method, trainloader='NAME')"
        )
    if held := [name for name, value in own.items() if isinstance(value, Optimizer)]:
        raise ValueError(
            f"{kind} makes its optimizer {held[0]!r} in its constructor, but each round puts another network into {net!r}: "
            "make the optimizer in fit"
        )
    return client


def _fit(message: Message, context: Context, client: Any, net: str, trainloader: str, method: Method, task: Task) -> Message:
    """Answer a train message. The function is at module level: ``run_simulation`` pickles inner functions with all they use."""
    with training(message, context, getattr(client, net), method, getattr(client, trainloader), task=task) as round:
        with _replaced(client, net, round.model, "fit"):
            returned, samples, metrics = _returned("fit", client.fit(_arrays(round.model), _config(message)), list)
        _load(round.model, returned, type(client).__name__)
    numbers = _numbers(metrics)
    loss = next((float(numbers[name]) for name in LOSSES if name in numbers), None)
    reply = round.message(samples, loss, numbers)
    reply.content[SCALARS] = ConfigRecord(_plain(metrics))
    return reply


def _evaluate(message: Message, context: Context, client: Any, net: str, method: Method) -> Message:
    """Answer an evaluate message."""
    model = evaluating(message, context, getattr(client, net), method)
    with _replaced(client, net, model, "evaluate"):
        loss, samples, metrics = _returned("evaluate", client.evaluate(_arrays(model), _config(message)), float)
    own = MetricRecord({**_numbers(metrics), "loss": float(loss), EXAMPLES: samples})
    return Message(RecordDict({OWN_METRICS: own, SCALARS: ConfigRecord(_plain(metrics))}), reply_to=message)


@contextmanager
def _replaced(client: Any, net: str, model: nn.Module, doing: str) -> Iterator[None]:
    """Put the network of the round into the client's attribute ``net``. In the ``with`` block, the network before it must not run.

    Raises:
        ValueError: the network before it ran: an object of the user's, such as a trainer, has kept it.
    """
    before: nn.Module = getattr(client, net)
    setattr(client, net, model)

    def refuse(*_: Any) -> None:
        holders = [name for name, value in vars(client).items() if value is before or before in _held_by(value)]
        raise ValueError(
            f"{type(client).__name__}.{doing} ran the network that {net!r} held when the client was made"
            f"{f' (its attribute {holders[0]!r} has it)' if holders else ''}, but each round puts another network there: use self.{net} "
            f"in {doing}, or make what holds the network in {doing}"
        )

    hook = before.register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def _held_by(value: Any) -> list[nn.Module]:
    return [one for one in getattr(value, "__dict__", {}).values() if isinstance(one, nn.Module)]


def _arrays(model: nn.Module) -> list[np.ndarray]:
    """Return copies of the network's arrays, as Flower gives them: training ``model`` does not change them."""
    return [tensor.detach().cpu().numpy().copy() for tensor in model.state_dict().values()]


def _config(message: Message) -> dict[str, Any]:
    return dict(message.content.config_records.get(CONFIG, {}))


def _returned(what: str, value: Any, first: type) -> tuple[Any, int, Mapping[str, Any]]:
    """Check the type of ``value``, which a client's ``fit`` or ``evaluate`` returned, and return it.

    Args:
        what: ``fit`` or ``evaluate``, for the error message.
        value: the returned value. Flower expects a tuple of three: arrays or loss, number of samples, metrics.
        first: the type of the first part.

    Raises:
        TypeError: the value is no such tuple.
    """
    if not (isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], first) and isinstance(value[1], int)):
        raise TypeError(f"{what} must return ({first.__name__}, number of samples as int, dict of metrics), but returned {value!r:.200}")
    if not isinstance(value[2], dict):
        raise TypeError(f"{what} must return its metrics as a dict, but returned {value[2]!r:.200}")
    return value


def _load(model: nn.Module, returned: list[Any], kind: str) -> None:
    """Copy the arrays that ``fit`` returned into the model, since the user's code may have clipped them or added noise.

    Raises:
        ValueError: number or shapes of the arrays are not those of the model.
    """
    state = model.state_dict()
    if len(returned) != len(state):
        raise ValueError(
            f"{kind}.fit returned {len(returned)} arrays, but its network has {len(state)} tensors: return all of them. The method decides "
            "which tensors stay with the client"
        )
    for (name, tensor), array in zip(state.items(), returned, strict=True):
        given = torch.as_tensor(np.asarray(array), device=tensor.device)
        if given.shape != tensor.shape:
            raise ValueError(f"{kind}.fit returned shape {tuple(given.shape)} for {name}, but the network has shape {tuple(tensor.shape)}")
        if not torch.equal(given.to(tensor.dtype), tensor):
            tensor.copy_(given)


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``metrics`` with Python's numbers in place of NumPy's."""
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in metrics.items()}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    return {name: value for name, value in _plain(metrics).items() if type(value) in (int, float)}
