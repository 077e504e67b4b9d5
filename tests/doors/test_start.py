"""A client's first BatchNorm is the one that the run starts with, in every door: the server's, and not what the client built."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.optim import SGD

from fl_bn import Callback, Federation, SeededBatches, convert, local_round, server_state
from fl_bn.flower import InProcessGrid, OwnAppStrategy, answer, evaluating, training
from fl_bn.methods import METHODS
from tests.doors.doors import RATE, application, epoch, flower, my_loop, own_loop
from tests.doors.inner import NO_DEFENCE, START, Samples, evaluate, roles
from tests.in_process import WatchedGrid, client_app, run
from tests.listed import listed
from tests.refusals import refused

SIZE, ROUNDS = 4, 2
Models = dict[tuple[int, int], dict[str, Tensor]]
"""By client and round: the state of its network after training."""


def fresh() -> nn.Sequential:
    """What a client builds: torch's own initial BatchNorm."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def pretrained() -> nn.Sequential:
    """What the server has."""
    model = fresh()
    torch.manual_seed(8)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.rand_like(tensor) + 0.5 if tensor.is_floating_point() else torch.tensor(33))
    return model


def data(clients: int = 3) -> list[Samples]:
    def one(n: int, seed: int) -> Samples:
        x = torch.randn(n, 3, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return Samples(x, x.flatten(1)[:, :3].argmax(1))

    return [one(8 + i, i) for i in range(clients)]


def remember(found: Models) -> Callable[[int, int, nn.Module], None]:
    def seen(client: int, round: int, model: nn.Module) -> None:
        found[client, round] = copy.deepcopy(model.state_dict())

    return seen


def alone(model: nn.Module, samples: Samples, index: int) -> dict[str, Tensor]:
    """Plain PyTorch: round 1 of a client that starts with ``model``."""
    mine = copy.deepcopy(model).train()
    my_loop(mine, epoch(SeededBatches(samples.x, samples.y, SIZE), index, 1))
    return mine.state_dict()


def through_federation(method: str) -> Models:
    clients, found = data(), Models()
    loaders = [SeededBatches(client.x, client.y, SIZE) for client in clients]
    fed = Federation(pretrained(), METHODS[method](), loaders, optimizer=partial(SGD, lr=RATE, momentum=0.9))
    for record in fed.run(ROUNDS):
        found |= {(i, record.round): dict(fed._transport.kept[i].get("local")) for i in range(len(clients))}
    return found


@pytest.mark.parametrize("method", [name for name, make in METHODS.items() if make().personal])
def test_a_client_s_first_batch_norm_is_the_server_s_in_every_door(method: str) -> None:
    clients, chosen = data(), METHODS[method]()
    home = {name for name, role in roles(fresh()).items() if role in chosen.local}
    plain = [alone(pretrained(), samples, i) for i, samples in enumerate(clients)]
    found: dict[str, Models] = {"federation": through_federation(method)}
    for name, door in (("own loop", own_loop), ("flower", flower)):
        found[name] = {}
        door(pretrained(), chosen, clients, ROUNDS, SIZE, NO_DEFENCE, fresh=fresh, seen=remember(found[name]))
    for models in found.values():
        assert set(models) == {(i, round) for i in range(len(clients)) for round in (1, 2)}
        for i, expected in enumerate(plain):
            assert all(torch.equal(models[i, 1][name], expected[name]) for name in home)
        for place, state in models.items():
            assert all(torch.equal(state[name], found["federation"][place][name]) for name in home)
    control = [alone(fresh(), samples, i) for i, samples in enumerate(clients)]
    assert not any(torch.equal(control[i][name], plain[i][name]) for i in range(3) for name in home)


def test_the_application_starts_with_it_too() -> None:
    """Its clients build what the server builds, from the same run config."""
    fedbn, strategy = METHODS["fedbn"](), partial(flower, fresh=fresh)
    first, same = (door(pretrained(), fedbn, data(), 1, SIZE, NO_DEFENCE)[0] for door in (application, strategy))
    assert all(torch.equal(first[name], same[name]) for name in first)
    (other,) = application(fresh(), fedbn, data(), 1, SIZE, NO_DEFENCE)
    assert not any(torch.equal(first[name], other[name]) for name in first)  # control


def started(messages: list[Message], round: int) -> set[int]:
    """The nodes that were sent a start in ``round``."""
    trained = [m for m in messages if m.metadata.message_type == "train" and m.metadata.group_id == str(round)]
    return {m.metadata.dst_node_id for m in trained if f"fl-bn/{START}" in m.content}


def own_app(method: str, seen: Callable[[int, int, nn.Module], None], fails: int = -1) -> ClientApp:
    """``fails``: the client whose round 1 ends in an error, after training."""
    app, clients, chosen = ClientApp(), data(), METHODS[method]()
    loaders = [SeededBatches(client.x, client.y, SIZE) for client in clients]
    answer(app, fresh, chosen, lambda context: loaders[context.node_config["partition-id"]])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        with training(message, context, fresh(), chosen) as round:
            loss = my_loop(round.model, epoch(loaders[i], i, round.local.instruction.round))
        seen(i, round.local.instruction.round, round.model)
        if i == fails and round.local.instruction.round == 1:
            raise RuntimeError("its power failed")
        return round.message(len(clients[i]), loss)

    @app.evaluate()
    def evaluate_it(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        model = evaluating(message, context, fresh(), chosen)
        loss = evaluate(model, clients[i]).result()["loss"]
        return Message(RecordDict({"metrics": MetricRecord({"loss": loss, "num-examples": 1})}), reply_to=message)

    return app


def test_a_client_that_joins_later_starts_with_it_and_nobody_is_sent_it_twice() -> None:
    found: Models = {}
    grid = WatchedGrid(own_app("fedbn", remember(found)), 3)
    strategy = OwnAppStrategy(pretrained(), METHODS["fedbn"](), fraction_train=0.34, min_train_nodes=1, fraction_evaluate=0)
    strategy.start(grid, num_rounds=4)
    firsts = {client: min(round for c, round in found if c == client) for client, _ in found}
    assert max(firsts.values()) > 1  # one joins later
    for client, round in found:
        assert len(started(grid.sent, round)) == (firsts[client] == round)
    late = max(firsts, key=lambda client: firsts[client])
    mine = pretrained().train()
    sent = next(m for m in grid.sent if m.metadata.message_type == "train" and m.metadata.group_id == str(firsts[late]))
    down = {name: torch.from_numpy(array.numpy().copy()) for name, array in sent.content["fl-bn/weights"].items()}
    mine.load_state_dict(down, strict=False)
    samples = data()[late]
    my_loop(mine, epoch(SeededBatches(samples.x, samples.y, SIZE), late, firsts[late]))
    assert all(torch.equal(found[late, firsts[late]][name], tensor) for name, tensor in mine.state_dict().items())


def test_a_client_whose_reply_was_lost_is_sent_it_again_and_goes_on_from_what_it_kept() -> None:
    found: Models = {}
    grid = WatchedGrid(own_app("fedbn", remember(found), fails=1), 3)
    OwnAppStrategy(pretrained(), METHODS["fedbn"](), fraction_evaluate=0).start(grid, num_rounds=2)
    assert (len(started(grid.sent, 1)), len(started(grid.sent, 2))) == (3, 1)
    kept = found[1, 1]["2.running_mean"]
    assert torch.equal(grid_state(grid, 1)["2.running_mean"], found[1, 2]["2.running_mean"])
    assert not torch.equal(kept, pretrained()[2].running_mean)  # control


def grid_state(grid: InProcessGrid, client: int) -> dict[str, Tensor]:
    context = next(c for c in grid._contexts.values() if int(c.node_config["partition-id"]) == client)
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in context.state["fl-bn/local"].items()}


def test_initial_arrays_with_batch_norm_are_the_start() -> None:
    """Flower's own way to begin from pre-trained weights: ``start(grid, ArrayRecord(net.state_dict()))``, and a strategy of ``Net()``."""
    found: Models = {}
    initial = ArrayRecord({k: v.clone() for k, v in pretrained().state_dict().items()})
    strategy = OwnAppStrategy(fresh(), METHODS["fedbn"](), fraction_evaluate=0)
    strategy.start(InProcessGrid(own_app("fedbn", remember(found)), 3, {}), initial, num_rounds=1)
    expected = alone(pretrained(), data()[0], 0)
    assert all(torch.equal(found[0, 1][name], tensor) for name, tensor in expected.items())
    assert not torch.equal(found[0, 1]["2.running_mean"], alone(fresh(), data()[0], 0)["2.running_mean"])  # control


def test_the_bytes_of_the_start_are_in_the_record_of_those_that_were_sent_it() -> None:
    records: list[Any] = []

    class Keep(Callback):
        def on_round(self, record: Any, rounds: int) -> None:
            records.append(record)

    strategy = OwnAppStrategy(pretrained(), METHODS["fedbn"](), fraction_evaluate=0, callbacks=[Keep()])
    strategy.start(InProcessGrid(own_app("fedbn", lambda *_: None), 3, {}), num_rounds=2)
    first, second = records
    size = sum(t.numel() * t.element_size() for t in pretrained()[2].state_dict().values())
    assert [one.bytes_down.get(START) for one in records] == [size, None]
    assert [c.bytes_down - d.bytes_down for c, d in zip(first.clients, second.clients, strict=True)] == [size] * 3


def test_methods_that_keep_no_layer_send_no_start() -> None:
    for name, make in METHODS.items():
        if name != "fedwon":  # which takes no network of linear layers
            asked = server_state(pretrained(), make(), rounds=2).instruction()
            assert (START in asked.sections) == make().personal, name


Forge = Callable[[dict[str, Tensor]], dict[str, Tensor]]
FORGED: dict[str, tuple[Forge, str]] = {
    "a tensor short": (lambda t: {k: v for k, v in t.items() if k != "2.bias"}, "2.bias"),
    "a tensor more": (lambda t: t | {"4.weight": torch.ones(3, 8).double()}, "4.weight"),
    "another shape": (lambda t: t | {"2.bias": torch.zeros(9).double()}, "2.bias"),
    "another type": (lambda t: t | {"2.bias": torch.zeros(8)}, "2.bias"),
    "no number": (lambda t: t | {"2.bias": torch.full((8,), torch.nan).double()}, "2.bias"),
    "a negative variance": (lambda t: t | {"2.running_var": -torch.ones(8).double()}, "2.running_var"),
}


@listed("forge, tensor", [pytest.param(*case, id=name) for name, case in FORGED.items()])
def test_a_start_that_is_none_is_refused_by_name(forge: Forge, tensor: str) -> None:
    fedbn, fedavg = METHODS["fedbn"](), METHODS["fedavg"]()
    asked = server_state(pretrained(), fedbn, rounds=1).instruction()
    with local_round(convert(fresh(), fedbn), fedbn, asked) as round:
        assert torch.equal(round.model.state_dict()["2.bias"], pretrained().state_dict()["2.bias"])  # control
    wrong = replace(asked, sections={**asked.sections, START: forge(asked.sections[START])})
    with refused(START, tensor), local_round(convert(fresh(), fedbn), fedbn, wrong):
        pass
    unasked = server_state(pretrained(), fedavg, rounds=1).instruction()
    extra = replace(unasked, sections={**unasked.sections, START: asked.sections[START]})
    with refused(START), local_round(convert(fresh(), fedavg), fedavg, extra):
        pass


# Evaluations are of clients that have trained


def test_federation_evaluates_clients_that_have_trained() -> None:
    clients = data(4)
    loaders = [SeededBatches(client.x, client.y, SIZE) for client in clients]
    test = [(data(5)[4].x, data(5)[4].y)]
    fed = Federation(pretrained(), METHODS["fedbn"](), loaders, fraction=0.25, test=test)
    before = fed.evaluate()["loss"]
    assert before == evaluate(pretrained(), test).result()["loss"]
    (record,) = fed.run(1)
    (trained,) = [client.client for client in record.clients]
    losses = [evaluate(fed.client_model(i), test).result()["loss"] for i in range(4)]
    assert record.evaluation["loss"] == losses[trained]
    assert record.evaluation["loss"] != sum(losses) / 4  # control


def evaluated(grid: WatchedGrid) -> set[int]:
    """The clients that were asked to evaluate."""
    return {message.metadata.dst_node_id - 1 for message in grid.sent if message.metadata.message_type == "evaluate"}


def test_an_own_app_s_strategy_evaluates_clients_that_have_trained(log: pytest.LogCaptureFixture) -> None:
    found: Models = {}
    strategy = OwnAppStrategy(pretrained(), METHODS["fedbn"](), fraction_train=0.34, min_train_nodes=1)
    grid = WatchedGrid(own_app("fedbn", remember(found)), 3)
    result = strategy.start(grid, num_rounds=1)
    ((trained, _),) = found
    assert evaluated(grid) == {trained}
    assert set(result.evaluate_metrics_clientapp[1]) == {"loss"}
    assert "round 1: 1 of 3 clients have trained so far" in log.text
    everyone = OwnAppStrategy(pretrained(), METHODS["fedavg"](), fraction_train=0.34, min_train_nodes=1)
    everyone.start(shared := WatchedGrid(own_app("fedavg", remember({})), 3), num_rounds=1)
    assert evaluated(shared) == {0, 1, 2}  # control


def test_the_application_evaluates_clients_that_have_trained(tmp_path: Path) -> None:
    grid = WatchedGrid(client_app(METHODS["fedbn"](), data(), model=pretrained(), folder=tmp_path), 3)
    ran = run(METHODS["fedbn"](), data(), 1, grid=grid, model=pretrained(), policy={"fraction": 0.34}, save_clients="saved")
    (record,) = ran.records
    assert set(record.client_evaluation) == {client.client for client in record.clients}
    assert len(record.client_evaluation) == 1
    assert len(list((tmp_path / "saved" / "clients").glob("*"))) == 3  # all save what they have
    all_of_them = run(METHODS["fedbn"](), data(), 1, model=pretrained())
    assert set(all_of_them.records[0].client_evaluation) == {0, 1, 2}  # control
