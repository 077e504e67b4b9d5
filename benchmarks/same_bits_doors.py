"""Train small federations through each door, and return the bits of the results, for ``same_bits.py``."""

from __future__ import annotations

import csv
import hashlib
import inspect
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, get_type_hints

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from fl_bn import Callback, Federation, SeededBatches, client_model, convert, flower, local_round, server_round, server_state
from fl_bn.flower import BatchNormClient, InProcessGrid, OwnAppStrategy, answer, evaluating, replayed, run_in_process, training
from fl_bn.methods import METHODS, StatisticsReport
from fl_bn.objectives import OBJECTIVES

ROUNDS, CLIENTS = 3, 3
PAPERS = {"setup": "experiments.papers:Papers"} if find_spec("experiments.papers") else {}  # older versions have these keys without it
OF_CLIENT = ("client", "samples", "steps", "loss", "distance")
OF_DRIFT = ("largest", "layer", "min_var", "growth")
OF_ROUND = ("round", "phase", "learning_rate", "aggregated", "loss", "evaluation", "client_evaluation", "own_metrics")
TABLES = {
    "rounds.csv": ("round", "phase", "learning-rate", "accepted", "loss", "accuracy", "accuracy-std", "test-loss", "min-var", "drift"),
    "clients.csv": ("client", "samples", "steps", "loss", "distance", "accuracy", "test-loss"),
}
STRATEGIES = {"fedavg": "FedAvgBN", "fixbn": "FixBN", "fedbn": "FedBN", "silobn": "SiloBN", "hbn": "HBN", "fbn": "FBN", "fedtan": "FedTAN"}
STRATEGIES |= {"fedtan2": "FedTAN2", "fedavg-alg2": "FedAvgAlg2"}


def bits(tensors: Mapping[str, Tensor | np.ndarray], figures: Any) -> str:
    """Return two hashes: of the named tensors, and of the figures."""
    found = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        found.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    told = hashlib.sha256(json.dumps(figures, sort_keys=True, default=float).encode())
    return f"tensors {found.hexdigest()[:16]} figures {told.hexdigest()[:16]}"


def figures_of(records: Iterable[Any]) -> list[Any]:
    """Return the figures of rounds' records."""

    def of(one: Any, names: Iterable[str]) -> list[Any]:
        return [getattr(one, name, None) for name in names]

    return [[*of(one, OF_ROUND), of(one.drift, OF_DRIFT), [of(client, OF_CLIENT) for client in one.clients]] for one in records]


def of_models(models: Mapping[Any, nn.Module]) -> dict[str, Tensor]:
    """Return the tensors of several networks by name."""
    return {f"{which} {name}": tensor for which, model in models.items() for name, tensor in model.state_dict().items()}


def same(resumed: str, whole: str) -> str:
    """Return the bits of a resumed run, if they are those of the run that nobody stopped."""
    return resumed if resumed == whole else f"resumed: {resumed}, but never stopped: {whole}"


def kind_of(function: Callable[..., Any], argument: str) -> Any:
    """Return the class of an argument, so that nothing is imported from modules that are not public."""
    default = inspect.signature(function).parameters[argument].default
    return get_type_hints(function)[argument] if default is inspect.Parameter.empty else type(default)


def network(dropout: float = 0.2) -> nn.Sequential:
    """Make a small network with BatchNorm of images and of sequences."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        images = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(2)]
        sequences = [nn.Conv1d(4, 6, 4), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout)]
        return nn.Sequential(*images, *sequences, nn.Linear(78, 3))


def data(client: int) -> tuple[Tensor, Tensor]:
    """Return the samples of a client. Clients differ in the number of samples, in their mean and in the shares of the classes."""
    x = torch.randn(24 + 4 * client, 1, 4, 4, generator=torch.Generator().manual_seed(client)) + 0.3 * client
    return x, (x[:, 0, 0, :3] + 0.5 * torch.eye(3)[client % 3]).argmax(1)


def loader(client: int) -> SeededBatches:
    """Return the training batches of a client."""
    return SeededBatches(*data(client), 8)


def trained(model: nn.Module, client: int, rate: float, backward: Callable[..., Tensor] | None = None) -> float:
    """Train in a loop as users write it; return the mean loss."""
    optimizer, losses = SGD(model.parameters(), rate, momentum=0 if backward else 0.9), []
    torch.manual_seed(client)  # for dropout
    for x, y in loader(client):
        optimizer.zero_grad()
        if backward:
            loss = backward(lambda x=x, y=y: F.cross_entropy(model(x), y), x)
        else:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses))


def tested(model: nn.Module, client: int) -> float:
    """Return the loss on a client's samples."""
    x, y = data(client)
    with torch.no_grad():
        return F.cross_entropy(model.eval()(x), y).item()


def parts(robust: bool, objective: str) -> dict[str, Any]:
    """Return the arguments ``defence`` and ``objective`` of a federation, a strategy or a server's state."""
    rules = {"defence": kind_of(Federation, "defence")(1, "nnm+median", "nnm+trimmed-mean")} if robust else {}
    return {**rules, "objective": OBJECTIVES[objective]()}


def federation(
    method: str, *, rate: float, device: str = "cpu", stops: bool = False, of: Mapping[str, Any] | None = None, robust: bool = False,
    objective: str = "none", adam: bool = False, dropout: float = 0.2, **options: Any,
) -> str:  # fmt: skip
    """Train in a ``Federation``. ``stops``: it ends after round 2, and another one goes on from its checkpoint."""
    sgd = partial(SGD, lr=rate, momentum=0.0 if objective == "scaffold" else 0.9)
    optimizer: Callable[..., Any] = partial(Adam, lr=rate / 10) if adam else sgd
    given = {"optimizer": optimizer, "evaluate_every": 2, "device": device, **parts(robust, objective), **options}

    def made() -> Federation:
        return Federation(network(dropout), METHODS[method](**(of or {})), [loader(i) for i in range(CLIENTS)], test=[data(9)], **given)

    def of_it(one: Federation) -> str:
        return bits(of_models({"": one.model, **{i: one.client_model(i) for i in range(CLIENTS)}}), figures_of(one.history))

    whole = made()
    list(whole.run(ROUNDS))
    if not stops:
        return of_it(whole)
    first, second = made(), made()
    for record in first.run(ROUNDS):
        if record.round == 2:
            first.checkpoint("state.safetensors")
            break
    second.resume("state.safetensors")
    list(second.run(ROUNDS))
    return same(of_it(second), of_it(whole))


def own_loop(method: str, *, rate: float, robust: bool = False, objective: str = "none") -> str:
    """Train in a loop of one's own, with ``server_state``, ``local_round`` and ``server_round``."""
    net, how, given = network(), METHODS[method](), parts(robust, objective)
    state = server_state(net, how, ROUNDS, clients=CLIENTS, rate=lambda *_: rate, **given)
    kept: dict[int, list[Any]] = {i: [] for i in range(CLIENTS)}
    records = []
    for _ in range(ROUNDS):
        asked, replies = state.instruction(), []
        for i in range(CLIENTS):
            model = convert(net, how)
            with local_round(model, how, asked, *kept[i], objective=given["objective"]) as round:
                if how.reports(asked.phase) is StatisticsReport.PASS:
                    round.measure(loader(i))
                loss = trained(model, i, asked.learning_rate, None if objective == "none" else round.backward)
            reply, own = round.reply(len(data(i)[1]), loss, client=i, metrics={"mine": i / 7})
            kept[i] = [own]
            replies.append(reply)
        state, record = server_round(state, replies)
        records.append(record)
    own_models = {i: client_model(net, how, state.instruction(), *own) for i, own in kept.items()}
    return bits(of_models({"": state.model, **own_models}), figures_of(records))


def own_app(method: str, *, rate: float, robust: bool = False, objective: str = "none", carrier: str = "auto", **options: Any) -> str:
    """Train in a Flower app of one's own, with ``answer``, ``training``, ``evaluating`` and a strategy."""
    app, how, given, ends = ClientApp(), METHODS[method](), parts(robust, objective), dict[Any, nn.Module]()
    answer(app, network, how, lambda context: loader(client_of(context)))

    @app.train(mods=[replayed])
    def train(message: Message, context: Context) -> Message:
        i, sent = client_of(context), dict(message.content.config_records["config"])
        with training(message, context, network(), how, loader(i), objective=given["objective"]) as round:
            loss = trained(round.model, i, float(str(sent["lr"])), None if objective == "none" else round.backward)
        return round.message(len(data(i)[1]), loss, {"mine": i / 7})

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        i = client_of(context)
        ends[i] = evaluating(message, context, network(), how)
        metrics = MetricRecord({"loss": tested(ends[i], i), "num-examples": len(data(i)[1])})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    given |= {"exchange": kind_of(flower.Rounds, "exchange")(carrier), **options}
    kind = getattr(flower, STRATEGIES.get(method, ""), None)
    strategy = kind(network(), **given) if kind else OwnAppStrategy(network(), how, **given)
    result = strategy.start(InProcessGrid(app, CLIENTS, {}), num_rounds=ROUNDS, train_config=ConfigRecord({"lr": rate}))
    return bits({**result.arrays.to_torch_state_dict(), **of_models(ends)}, figures_of(result.records))


def client_of(context: Context) -> int:
    """Return the number of the client with this context."""
    return int(context.node_config["partition-id"])


class Client(NumPyClient):
    """Serve as a client of Flower's older API, as users write it. ``ends`` gets the arrays that it tests."""

    def __init__(self, context: Context, ends: dict[str, np.ndarray]) -> None:
        self.i, self.ends = client_of(context), ends
        self.net, self.trainloader = network(), loader(self.i)

    def load(self, arrays: list[np.ndarray]) -> None:
        self.net.load_state_dict({name: torch.tensor(array) for name, array in zip(self.net.state_dict(), arrays, strict=True)})

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        self.load(parameters)
        loss = trained(self.net.train(), self.i, config["lr"])
        return [tensor.numpy() for tensor in self.net.state_dict().values()], len(data(self.i)[1]), {"loss": loss}

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        self.load(parameters)
        self.ends |= {f"{self.i} {number}": array for number, array in enumerate(parameters)}
        return tested(self.net, self.i), len(data(self.i)[1]), {"mine": self.i / 7}


class Keeps(Callback):
    """Keep the records of all rounds."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def on_round(self, record: Any, rounds: int) -> None:
        self.records.append(record)


def older_api(method: str, *, rate: float) -> str:
    """Train in an app of Flower's older API: a ``NumPyClient``, and a ``server_fn`` with Flower's ``FedAvg``."""
    keeps, ends = Keeps(), dict[str, np.ndarray]()

    def at_server(round: int, arrays: list[np.ndarray], config: dict[str, Any]) -> None:
        ends.update({f"server {number}": array for number, array in enumerate(arrays)})

    def server_fn(context: Context) -> ServerAppComponents:
        strategy = FedAvg(on_fit_config_fn=lambda round: {"lr": rate}, evaluate_fn=at_server)
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))

    app = flower.legacy_client_app(lambda context: Client(context, ends), METHODS[method](), tells=True)
    server = flower.legacy_server_app(server_fn, network, METHODS[method](), callbacks=[keeps])
    server(InProcessGrid(app, CLIENTS, {}), Context(1, 0, {}, RecordDict(), {}))
    return bits(ends, figures_of(keeps.records))


def own_client(method: str, *, rate: float, strategy: str = "", **options: Any) -> str:
    """Train with ``BatchNormClient``."""
    contexts = dict[int, Context]()
    rounds = flower.Rounds(CLIENTS, rate=lambda *_: rate, evaluate_every=2, at_clients=True, wait=0.0)
    how = METHODS[method]()
    if (kind := getattr(flower, f"{strategy or STRATEGIES.get(method, '')}Strategy", None)) is not None:  # in a checkout of before
        made = kind(network(), rounds, **options)
    else:
        rules = {"defence": kind_of(Federation, "defence")(options["f"], "nnm+median", "nnm+median")} if strategy == "RobustFBN" else {}
        made = flower.BatchNormStrategy(network(), how, rounds, **rules)
    settings = kind_of(BatchNormClient.__init__, "settings")(batch_size=8, steps=2, momentum=0.9)

    def build(context: Context) -> BatchNormClient:
        samples = kind_of(flower.Site.__init__, "train")(*data(client_of(context)))
        site = flower.Site(client_of(context), CLIENTS, samples, samples, torch.device("cpu"))
        contexts.setdefault(client_of(context), context)
        return BatchNormClient(convert(network(), how), how, settings, site, context.state, tells=True)

    result = made.start(InProcessGrid(flower.make_client_app(build), CLIENTS, {}), num_rounds=ROUNDS)
    tensors: dict[str, Any] = dict(result.arrays.to_torch_state_dict())
    for i, context in contexts.items():
        tensors |= {f"{i} {number}": tensor for number, tensor in enumerate(build(context).kept_layers({}, ROUNDS).values())}
    return bits(tensors, figures_of(result.records))


class Stops(Callback):
    """Stop a run of the application in round 2, as Ctrl-C does."""

    def __init__(self, config: Any, folder: Any) -> None:
        pass  # every callback of a run config gets these two

    def on_round(self, record: Any, rounds: int) -> None:
        if record.round == 2:
            raise KeyboardInterrupt


def application(method: str, *, rate: float, device: str = "cpu", stops: bool = False, **options: Any) -> str:
    """Run the application in this process. ``stops``: it is stopped in round 2, and goes on from its checkpoint."""
    given = {
        "method": method, "rounds": ROUNDS, "clients": CLIENTS, "evaluate-every": 2, "local-steps": 2, "learning-rate": rate,
        **PAPERS,
        "samples-share": 0.4, "model": "simple-cnn" if method == "in" else "digits-cnn-small", "device": device, "pictures": False,
        **{name.replace("_", "-"): value for name, value in options.items()},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        given |= {"output": folder, "name": "run"}
        if stops:
            given |= {"checkpoint-every": 1}
            with suppress(KeyboardInterrupt):
                run_in_process({**given, "callbacks": f"{__name__}:Stops"})
            given |= {"resume": "run"}
        run = run_in_process(given)
        assert run is not None
        files = {str(file.relative_to(run)): load_file(file) for file in run.rglob("*.safetensors")}
        rows: list[list[Any]] = []
        for file, columns in TABLES.items():
            with open(run / file, newline="") as text:
                rows += [[row.get(column) for column in columns] for row in csv.DictReader(text)]
    found = bits({f"{file} {name}": tensor for file, tensors in files.items() for name, tensor in tensors.items()}, rows)
    return same(found, application(method, rate=rate, device=device, **options)) if stops else found
