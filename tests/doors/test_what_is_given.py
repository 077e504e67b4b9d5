"""What users give to a federation by mistake: optimisers of other parameters, losses that learn, lists of loaders, empty test sets."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fl_bn import Callback, EarlyStop, Federation, Regression, SeededBatches, convert, local_round, methods, per_client, server_state
from fl_bn.federation.record import RoundRecord
from fl_bn.methods import Method

KINDS = ("fedavg", "fedbn", "fixbn", "fbn", "hbn", "fedtan")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(n: int = 8, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 5, generator=generator), torch.randint(0, 3, (n,), generator=generator))]


def fed(method: Method | None = None, model: nn.Module | None = None, clients: Any = None, **named: Any) -> Federation:
    given = [batches(seed=i) for i in range(3)] if clients is None else clients
    return Federation(model or net(), method or methods.fedavg(), given, progress=False, **named)


# Optimisers and schedulers


@pytest.mark.parametrize("name", KINDS)
def test_an_optimiser_of_other_parameters_is_refused(name: str) -> None:
    """Before, every round ran and no weight changed, in every method, without a word."""
    method, model = getattr(methods, name)(), net()
    with pytest.raises(ValueError, match="6 of the 6 parameters of its SGD are others"):
        fed(method, model, optimizer=lambda parameters: torch.optim.SGD(model.parameters(), lr=0.1))
    ready = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="parameters of its SGD are others"):
        fed(method, model, optimizer=lambda parameters: ready)
    more = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="1 of the 7 parameters of its SGD"):
        fed(method, model, optimizer=lambda parameters: torch.optim.SGD([*parameters, more], lr=0.1))
    good = fed(method, model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))  # control
    before = good.model[0].weight.clone()
    list(good.run(1))
    assert not torch.equal(before, good.model[0].weight)


def test_an_optimiser_that_forgets_its_argument_later_is_refused_in_its_round() -> None:
    """The function may behave well once: the check is of each round, too."""
    made: list[torch.optim.Optimizer] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=0.1))
        return made[0]

    with pytest.raises(ValueError, match="parameters of its SGD are others") as refused:
        list(fed(optimizer=make).run(1))
    assert refused.value.__notes__ == ["at client 0, in round 1"]


def test_a_part_of_the_parameters_is_no_mistake() -> None:
    some = fed(optimizer=lambda parameters: torch.optim.SGD(list(parameters)[:2], lr=0.1))
    before = copy.deepcopy(some.model.state_dict())
    list(some.run(1))
    assert not torch.equal(before["0.weight"], some.model[0].weight)
    assert torch.equal(before["3.weight"], some.model[3].weight)


def test_a_scheduler_of_another_optimiser_is_refused() -> None:
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="StepLR of another optimiser than the one that it was given"):
        fed(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(other, 1))
    list(fed(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)).run(1))  # control


# Losses


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output * self.t, targets)


class Holds:
    def __init__(self) -> None:
        self.inner = Temperature()

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        return self.inner(output, targets)  # type: ignore[no-any-return]


@pytest.mark.parametrize("loss", [Temperature(), Holds()], ids=["a module", "an object with one"])
def test_a_loss_that_would_learn_is_refused(loss: Any) -> None:
    with pytest.raises(ValueError, match="Temperature has a parameter to learn, 't', but only the network's parameters are trained"):
        fed(loss=loss)
    fixed = Temperature().requires_grad_(False)  # control
    list(fed(loss=fixed).run(1))
    list(fed(loss=nn.CrossEntropyLoss(weight=torch.ones(3))).run(1))


# Batches and loaders


def test_a_client_without_test_samples_counts_in_no_mean() -> None:
    for name in ("fedavg", "fedbn"):
        some = fed(getattr(methods, name)(), test=per_client([batches(8, 5), batches(4, 6), []]))
        (record,) = some.run(1)
        assert set(record.client_evaluation) == {0, 1}
        first, second = (record.client_evaluation[client] for client in (0, 1))
        assert record.evaluation["loss"] == pytest.approx((8 * first["loss"] + 4 * second["loss"]) / 12)


@pytest.mark.parametrize("test", [[], per_client([[], [], []])], ids=["one", "each"])
def test_no_test_batch_at_all_is_said(test: Any) -> None:
    with pytest.raises(ValueError, match="test has no batch: give test batches, or None"):
        list(fed(test=test).run(1))


class Pictures(Dataset[tuple[Tensor, int]]):
    """As torchvision's: each element is a picture and its class."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(5), index % 3


class WholeBatches(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of one's own, whose elements are batches."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= len(self):
            raise IndexError
        return batches(seed=index)[0]


def loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*batches()[0]), batch_size=4)


@pytest.mark.parametrize(
    ("give", "words"),
    [
        (lambda: fed(clients=loader()), "clients: expected a loader for each client, but got a single DataLoader"),
        (lambda: fed(clients=SeededBatches(*batches()[0], 4)), "expected a loader for each client, but got a single SeededBatches"),
        (lambda: fed(clients=batches()), "client 0: expected batches, but got a single one"),
        (lambda: fed(clients=[{"x": torch.ones(2), "y": torch.ones(2)}]), "client 0: expected batches, but got a single one"),
        (lambda: fed(clients=[torch.ones(4, 5)]), "client 0: expected batches, but got a single one"),
        (lambda: fed(test=[loader(), loader(), loader()]), r"test: expected batches, but got a list of DataLoader objects.*per_client"),
        (lambda: fed(clients=[[loader()]]), "client 0: expected batches, but got a list of DataLoader objects"),
        (lambda: fed(test=batches()[0]), "test of client 0: expected batches, but got a single one"),
        (lambda: fed(clients=[loader().dataset]), "client 0: expected batches, but got a TensorDataset of single samples: give DataLoader"),
        (lambda: fed(clients=[Pictures()]), "client 0: expected batches, but got a Pictures of single samples"),
        (lambda: fed(clients=[[*zip(*batches()[0], strict=True)]]), "client 0: expected batches, but got a list of single samples: give"),
        (lambda: fed(clients=[[(torch.ones(5), 1)] * 4]), "client 0: expected batches, but got a list of single samples"),
        (lambda: fed(test=Subset(Pictures(), [1])), "test of client 0: expected batches, but got a Subset of single samples"),
        (lambda: fed(clients=(batches() for _ in range(3))), r"clients: expected a list .*, but got a generator: .*, list\(clients\)$"),
        (lambda: fed(clients={"a": batches()}), r"clients: expected a list .*, but got a dict: .*, list\(clients.values\(\)\)$"),
        (lambda: fed(clients=7), "clients: expected a list of loaders, one for each client, but got a int: give such a list$"),
    ],
)
def test_what_is_no_loader_is_refused_before_round_1(give: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        give()


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99", 3.5])
def test_a_device_that_cannot_compute_is_refused_before_round_1(device: Any) -> None:
    with pytest.raises(ValueError, match=rf"device must be one on which torch can compute here, such as cpu.*, but got {device!r}: "):
        fed(device=device)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_control_a_device_that_can_compute_is_taken(device: Any) -> None:
    assert len([*fed(device=device).run(1)]) == 1


def test_control_a_dataset_of_batches_is_trained_on() -> None:
    (record,) = fed(clients=[WholeBatches(), WholeBatches()]).run(1)
    assert [client.samples for client in record.clients] == [16, 16]


class Itself(Regression):
    """Learn to reproduce the inputs: a batch is one tensor."""

    def read(self, batch: Any) -> tuple[Any, Any]:
        return batch, batch


def test_control_a_task_that_reads_tensors_gets_lists_of_tensors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    inputs = [x for x, _ in batches()]
    (record,) = fed(model=model, clients=[inputs, inputs], test=inputs, task=Itself()).run(1)
    assert record.loss > 0


def test_an_error_of_torch_s_names_client_and_round() -> None:
    double = [(batches()[0][0].double(), batches()[0][1])]
    with pytest.raises(RuntimeError, match="dtype") as raised:
        list(fed(clients=[batches(), double]).run(1))
    assert raised.value.__notes__ == ["at client 1, in round 1"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"callbacks": EarlyStop(2)}, r"callbacks must be a list of callbacks, but got a single EarlyStop: give callbacks=\["),
        ({"callbacks": EarlyStop}, "callbacks must be a list of callbacks, but got the class EarlyStop"),
        ({"callbacks": None}, "callbacks must be a list of callbacks, but got None"),
        ({"callbacks": [EarlyStop]}, "callbacks must be objects of subclasses of Callback, but got <class"),
        ({"local_epochs": "2"}, "whole numbers >= 1 as local_epochs and evaluate_every, but got 3 clients, local_epochs='2'"),
        ({"local_epochs": True}, "whole numbers >= 1 as .*, local_epochs=True"),
        ({"evaluate_every": 1.5}, "whole numbers >= 1 as .* and evaluate_every=1.5"),
        ({"schedule": 0.5}, r"schedule must be a function of \(round, rounds\) that returns a factor, but got 0.5"),
    ],
)
def test_an_argument_of_another_type_is_refused_in_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        fed(**options)
    assert "\n" not in str(caught.value)


def test_callbacks_from_a_generator_are_called() -> None:
    seen: list[int] = []

    class Seen(Callback):
        def on_round(self, record: RoundRecord, rounds: int) -> None:
            seen.append(record.round)

    list(fed(callbacks=(Seen() for _ in range(2))).run(2))
    assert seen == [1, 1, 2, 2]


@pytest.mark.parametrize("client", [3, -1, "0", 1.0, True, None])
def test_the_network_of_no_client_is_refused(client: Any) -> None:
    federation = fed(methods.fedbn())
    list(federation.run(1))
    with pytest.raises(ValueError, match=rf"client must be a client's number, 0..2, but got client_model\({client!r}\)"):
        federation.client_model(client)
    assert not torch.equal(federation.client_model(0)[1].weight, federation.client_model(np.int64(2))[1].weight)  # control


# Rounds


def test_a_run_that_was_over_is_gone_on_with_as_another(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    done = fed(clients=[SeededBatches(*batches()[0], 4)])
    list(done.run(2))
    done.checkpoint(tmp_path / "state.safetensors")
    again = fed(clients=[SeededBatches(*batches()[0], 4)])
    again.resume(tmp_path / "state.safetensors")
    with caplog.at_level(logging.INFO):
        assert [record.round for record in again.run(3)] == [1, 2, 3]
    assert "the saved run of 2 rounds is over: run(3) starts a new run from the saved model" in caplog.messages
    assert [record.round for record in done.run(3)] == [1, 2, 3]  # as a second call is
    assert all(torch.equal(own, other) for own, other in zip(done.model.parameters(), again.model.parameters(), strict=True))


def test_fewer_than_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rounds must be a whole number >= 0, but got run\(-1\)"):
        list(fed().run(-1))


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_training_without_gradients_is_refused(off: Any) -> None:
    with off(), pytest.raises(ValueError, match=r"outside of torch.no_grad\(\) and torch.inference_mode\(\)"):
        list(fed().run(1))


def test_measuring_needs_no_gradients() -> None:
    with torch.no_grad():
        assert list(fed(methods.fbn()).run(0)) == []


def test_a_run_does_not_go_on_after_a_later_one() -> None:
    federation = fed()
    first = federation.run(3)
    assert next(first).round == 1
    assert [record.round for record in federation.run(2)] == [1, 2]
    with pytest.raises(ValueError, match=r"cannot go on after round 1 of 3"):
        next(first)


def test_a_run_that_was_left_is_no_obstacle() -> None:
    federation = fed()
    left = federation.run(3)
    next(left)
    assert [record.round for record in federation.run(2)] == [1, 2]


def test_a_network_without_values_is_refused() -> None:
    with torch.device("meta"):
        empty = net()
    with pytest.raises(ValueError, match=r"is on the meta device, so it has a shape, but no values"):
        fed(model=empty)


class Small(nn.Module):
    """A network of which ``less`` names what its state_dict leaves out, to keep files small."""

    less = "none"

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def state_dict(self, *args: Any, **named: Any) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict(*args, **named).items() if not name.startswith(self.less)}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, False, assign)


class WithExtra(Small):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None: ...


@pytest.mark.parametrize("method", [methods.fedavg(), methods.fedbn()], ids=lambda method: method.name)
@pytest.mark.parametrize("door", ["federation", "state"])
def test_a_state_dict_that_lacks_what_is_trained_is_refused(door: str, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    def given(model: nn.Module) -> None:
        if door == "federation":
            list(fed(method, model).run(1))
        else:
            server_state(model, method, rounds=1)

    given(Small())  # control
    leaves = r"the state_dict of Small must have .*, but leaves out {}, {}: let state_dict\(\) return it"
    for less, what in (("body.0.weight", "a parameter to train"), ("body.1.running_mean", "a running statistic of BatchNorm")):
        monkeypatch.setattr(Small, "less", less)
        with pytest.raises(ValueError, match=leaves.format(less, what)):
            given(Small())
    monkeypatch.setattr(Small, "less", "body.0")
    frozen = Small()
    frozen.body[0].requires_grad_(False)
    given(frozen)  # control: what does not change need not travel
    monkeypatch.undo()
    with pytest.raises(ValueError, match="every entry of the state_dict must be a parameter or a buffer, but .*_extra_state"):
        given(WithExtra())


@pytest.mark.parametrize("name", ["fedavg", "hbn"])
def test_a_network_that_is_frozen_later_concerns_no_copy(name: str) -> None:
    method, given = getattr(methods, name)(), net()
    later, usual = fed(method, given), fed(method)
    state = server_state(given, method, rounds=1)
    given.requires_grad_(False)
    list(later.run(1))
    list(usual.run(1))
    assert all(torch.equal(own, other) for own, other in zip(later.model.parameters(), usual.model.parameters(), strict=True))
    assert state.instruction().round == 1
    with pytest.raises(ValueError, match="has no parameter with requires_grad=True"):  # control
        fed(method, given)
    with pytest.raises(ValueError, match="has no parameter with requires_grad=True"):
        server_state(given, method, rounds=1).instruction()


# Loops of one's own


@pytest.mark.parametrize("name", KINDS[:-1])
def test_a_reply_without_a_step_is_an_error_at_the_client(name: str) -> None:
    """A loop that trains another network, or nothing. Before, the server refused the reply for steps of 0, or counted it."""
    method = getattr(methods, name)()
    state, model, other = server_state(net(), method, rounds=4), convert(net(), method), net()
    with local_round(model, method, state.instruction()) as round:
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        F.cross_entropy(other(batches()[0][0]), batches()[0][1]).backward()
        optimizer.step()
    with pytest.raises(ValueError, match=r"no step on round\.model was made in round 1, so there is nothing to send"):
        round.reply(8)
    with local_round(model, method, state.instruction()) as round:  # control
        if name == "hbn":
            round.measure(batches())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        F.cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()
        optimizer.step()
    assert round.reply(8)[0].samples == 8


def test_the_source_checks_what_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the check in each round: without it, a round trains nothing."""
    made: list[torch.optim.Optimizer] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=0.1))
        return made[0]

    monkeypatch.setattr("fl_bn.federation.engines.clients.check_parameters", lambda *given: None)
    some = fed(optimizer=make)
    before = some.model[0].weight.clone()
    list(some.run(1))
    assert torch.equal(before, some.model[0].weight)
