"""What hooks and handlers of others return, and when: the numbers of the same work done in another way, or one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import Federation, methods, set_buffer_roles
from fl_bn.flower import FBN, HBN, FedAvgBN, FedBN, FixBN, OwnAppStrategy, RunFailed, answer, evaluating, training
from fl_bn.flower.in_process import InProcessGrid
from fl_bn.flower.own.rates import as_number
from fl_bn.methods import Method
from tests.flower.own_apps import CLIENTS, SAMPLES, client_of, data, net, own_app
from tests.flower.test_others_own_apps import ran


def tensors(result: Any) -> dict[str, Tensor]:
    return dict(result.arrays.to_torch_state_dict())


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(tensor, tensors(other)[name]) for name, tensor in tensors(one).items())


# a reply that is made inside the block


def accumulating(method: Method, inside: bool, samples: int = SAMPLES) -> ClientApp:
    """Step at every second batch; the last, odd batch makes no step."""
    app = ClientApp()
    answer(app, net, method, lambda context: data(client_of(context)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        parts = [part for batch in data(client_of(context)) for part in zip(*(one.split(3) for one in batch), strict=True)][:5]
        with training(message, context, net(), method, data(client_of(context))) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
            for number, (x, y) in enumerate(parts):
                F.cross_entropy(round.model(x), y).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            if inside:
                return round.message(samples, 1.0)
        return round.message(samples, 1.0)

    return app


@pytest.mark.parametrize(
    "method", [methods.fedavg(), methods.fbn(report="all"), methods.hbn(separate=False, evaluate_clients="cohort"), methods.fbn()]
)
def test_a_reply_inside_the_block_is_that_after_it(method: Method) -> None:
    """Before, passes after the last step counted, so that FBN's statistics were other ones."""
    made = [
        ran(OwnAppStrategy(net(), method, unit_scale=False, fraction_evaluate=0), accumulating(method, inside), rounds=2)
        for inside in (True, False)
    ]
    assert same(*made)


class Bank(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(1, 6, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x


def banked() -> nn.Module:
    return set_buffer_roles(nn.Sequential(*net()[:2], Bank(), *net()[2:]), {"*.bank": "kept"})


def test_a_round_that_ends_in_an_error_stores_nothing() -> None:
    """Before, a state with another shape was stored, so that every later round failed, too."""
    method, app = methods.fedbn(), ClientApp()
    answer(app, banked, method, lambda context: data(client_of(context)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with training(message, context, banked(), method) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
            x, y = data(client_of(context))[0]
            F.cross_entropy(round.model(x), y).backward()
            optimizer.step()
            if client_of(context) == 1 and round.number == 1:
                round.model[2].bank = torch.zeros(3, 6)
            return round.message(SAMPLES, 1.0)

    result = ran(OwnAppStrategy(banked(), method, fraction_evaluate=0), app, rounds=3)
    refused = [[bool(client.refused) for client in record.clients] for record in result.records]
    assert refused == [[False, True, False], [False] * 3, [False] * 3]


# arrays and messages of hooks


class Drops(FedAvgBN):
    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        return ArrayRecord({name: array for name, array in arrays.items() if not name.startswith("1.")}), metrics


class Renames(FedAvgBN):
    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        return ArrayRecord({**arrays, "module.0.weight": Array(np.zeros((6, 4), np.float32))}), metrics


@pytest.mark.parametrize(
    ("strategy", "said"), [(Drops, r"left out 1\.weight and \d more"), (Renames, "gave an unknown array module.0.weight")]
)
def test_arrays_that_are_missing_or_unknown_are_named(strategy: Any, said: str) -> None:
    """Before, such arrays had no effect, without a word."""
    with pytest.raises(RunFailed, match=f"a hook {said}.*: return all arrays that the hook got, by their names. Which tensors are shared"):
        ran(strategy(net()), own_app("fedavg"))


def test_whole_numbers_that_became_floats_are_named() -> None:
    model = set_buffer_roles(nn.Sequential(*net()[:2], Bank(torch.int64), *net()[2:]), {"*.bank": "constant"})
    strategy = OwnAppStrategy(model, methods.fedavg())
    strategy._rounds = strategy._meet(InProcessGrid(own_app("fedavg", model=lambda: model), CLIENTS, {}), 10.0, {})
    given = strategy._running.outward(strategy._running.shared.tensors())
    with pytest.raises(RunFailed, match=r"a hook gave 2\.bank as torch.float32, but the network has torch.int64"):
        strategy._running.inward(ArrayRecord({name: Array(array.numpy().astype(np.float32)) for name, array in given.items()}))


class Doubles(FedAvgBN):
    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        wider = {n: Array(a.numpy().astype(np.float64)) if a.dtype == "float32" else a for n, a in arrays.items()}
        return ArrayRecord(wider), metrics


def test_wider_floats_are_rounded_to_those_of_the_network() -> None:
    """Before, they ended in "Double did not match Float"."""
    plain, wide = (ran(kind(net(), fraction_evaluate=0), own_app("fedavg")) for kind in (FedAvgBN, Doubles))
    assert same(plain, wide)


class Yields(FedBN):
    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        yield from super().configure_train(server_round, arrays, config, grid)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        yield from super().configure_evaluate(server_round, arrays, config, grid)


def test_hooks_may_be_generators() -> None:
    """Before, a generator was read after the strategy had looked whom it addresses, and was refused."""
    plain, lazy = (ran(kind(net()), own_app("fedbn"), rounds=2) for kind in (FedBN, Yields))
    assert same(plain, lazy)
    assert plain.evaluate_metrics_clientapp == lazy.evaluate_metrics_clientapp


@pytest.mark.parametrize(
    ("hook", "returned", "said"),
    [
        ("aggregate_train", ([np.zeros(3)], None), "aggregate_train must return an ArrayRecord and a MetricRecord, or None for them, but"),
        ("aggregate_train", (None, 0.5), "aggregate_train must return an ArrayRecord and a MetricRecord, or None for them, but one is 0.5"),
        ("aggregate_evaluate", (0.5, {}), "aggregate_evaluate must return a MetricRecord or None, but returned"),
    ],
)
def test_what_a_hook_returns_of_another_type_is_named(hook: str, returned: Any, said: str) -> None:
    strategy = type("Own", (FedAvgBN,), {hook: lambda self, server_round, replies: ([*replies], returned)[1]})
    with pytest.raises(RunFailed, match=said):
        ran(strategy(net()), own_app("fedavg"))


# rates, losses, fractions


@pytest.mark.parametrize(
    ("value", "number"), [(0.1, 0.1), (1, 1.0), ("0.1", 0.1), ("1e-2", 0.01), ("auto", None), ([0.1], None), (True, None)]
)
def test_a_rate_may_be_a_number_that_is_written_as_text(value: Any, number: float | None) -> None:
    assert as_number(value) == number


@pytest.mark.parametrize("strategy", [FBN, lambda model, **named: FixBN(model, freeze_after=1, **named)])
def test_a_rate_as_text_is_that_of_the_number(strategy: Any) -> None:
    """Before, FBN tracked as at 0.05, and FixBN's frozen rounds were not lowered."""

    class Halving:
        def __init__(self, kind: type) -> None:
            self.kind = kind

        def __call__(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
            config["lr"] = self.kind(0.1 * 0.5 ** (server_round - 1))
            return self.inner(server_round, arrays, config, grid)  # type: ignore[attr-defined, no-any-return]

    made = []
    for kind in (str, float):
        own = strategy(net(), fraction_evaluate=0)
        hook = Halving(kind)
        hook.inner = own.configure_train  # type: ignore[attr-defined]
        own.configure_train = hook
        name = "fbn" if strategy is FBN else methods.fixbn(freeze_after=1)
        made.append(ran(own, own_app(name, rate=lambda message: float(str(message.content["config"]["lr"]))), rounds=3))
    assert same(*made)


def test_a_loss_among_the_metrics_is_the_training_loss(caplog: pytest.LogCaptureFixture) -> None:
    """Before, it was replaced by NaN, and every round warned of divergence. So are NumPy's numbers taken."""
    method, app = methods.fedavg(), ClientApp()
    answer(app, net, method, lambda context: data(client_of(context)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with training(message, context, net(), method) as round:
            x, y = data(client_of(context))[0]
            F.cross_entropy(round.model(x), y).backward()
            torch.optim.SGD(round.model.parameters(), lr=0.1).step()
        return round.message(SAMPLES, metrics={"loss": 0.75, "acc": np.float32(0.5)})  # type: ignore[dict-item]

    result = ran(OwnAppStrategy(net(), method, fraction_evaluate=0), app)
    assert result.records[0].loss == 0.75
    assert result.train_metrics_clientapp[1]["acc"] == 0.5
    assert "diverged" not in caplog.text


@pytest.mark.parametrize(
    ("method", "fraction", "said"), [(methods.hbn(), 0.67, 1), (methods.hbn(fraction=0.67), 0.67, 0), (methods.hbn(), 1.0, 0)]
)
def test_hbn_hears_that_a_part_of_the_clients_trains(method: Method, fraction: float, said: int, caplog: pytest.LogCaptureFixture) -> None:
    """Before, the tracking of all clients was used, without a word, unless the class HBN got the fraction itself."""
    ran(OwnAppStrategy(net(), method, fraction_train=fraction, fraction_evaluate=0), own_app(method))
    Federation(net(), method, [data(i) for i in range(CLIENTS)], fraction=fraction, progress=False)
    words = "hbn follows the statistics as fast as if all clients took part in every round, but a share of 0.67 does"
    assert caplog.text.count(words) == 2 * said
    caplog.clear()
    ran(HBN(net(), fraction_train=0.67, fraction_evaluate=0), own_app(methods.hbn(fraction=0.67)))
    assert words not in caplog.text


# the client


def test_training_in_an_evaluate_handler_is_named() -> None:
    """Before, a learning rate was missing."""
    method, app, inner = methods.fedbn(), ClientApp(), own_app("fedbn")
    answer(app, net, method, lambda context: data(client_of(context)))
    app.train()(lambda message, context: inner(message, context))
    seen: list[str] = []

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        try:
            with training(message, context, net(), method):
                pass
        except ValueError as error:
            seen.append(str(error))
            evaluating(message, context, net(), method)  # control
            raise
        raise AssertionError

    ran(FedBN(net()), app)
    assert len(seen) == CLIENTS
    assert all("training(...) answers a train message, but this is a message of type 'evaluate'" in one for one in seen)


def test_a_client_s_run_config_is_its_own() -> None:
    seen: list[float] = []

    def before(message: Message, context: Context) -> None:
        context.run_config["lr"] = float(context.run_config["lr"]) * 0.5
        seen.append(float(context.run_config["lr"]))

    grid = InProcessGrid(own_app("fedavg", before=before), CLIENTS, {"lr": 1.0})
    FedAvgBN(net(), fraction_evaluate=0).start(grid, num_rounds=2)
    assert seen == [0.5] * CLIENTS + [0.25] * CLIENTS


def test_the_server_hears_what_to_do_about_a_batch_of_one() -> None:
    """Before, the advice was in the client's log alone."""
    app = own_app("fedavg", batches=lambda client: [(x[:1], y[:1]) for x, y in data(client)])
    with pytest.raises(RunFailed, match=r"One sample has no variance where BatchNorm normalises with its batch: let the loader"):
        ran(FedAvgBN(net(), fraction_evaluate=0), app)
