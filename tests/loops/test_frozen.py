"""What a method freezes stays frozen whatever the loop does: statistics bit for bit, and every number as in a plain loop."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_bn import Federation, convert, local_round, methods, server_round, server_state
from fl_bn.federation.optimizers import SERVER_OPTIMIZERS, server_optimizer
from fl_bn.federation.values import NOTHING
from fl_bn.methods import Method, freeze
from fl_bn.roles import batch_norms
from tests.doors.doors import apart
from tests.loops.loops import DOORS, cells, plain, step

METHODS: dict[str, Method] = {
    "fixbn": methods.fixbn(freeze_after=1),
    "fixbn, both": methods.fixbn(freeze_after=1, freeze_what="both"),
    "fedtan2": methods.fedtan2(freeze_after=1),
    "hbn": freeze(methods.hbn(), 1),
    "fbn": freeze(methods.fbn(), 1),
    "fedavg": freeze(methods.fedavg(), 1),
}


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()


def clients() -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=rng, dtype=torch.float64) * 3 + 5, torch.randint(0, 2, (n,), generator=rng)) for n in (16, 8, 12)]


def train(round: Any, x: Tensor, y: Tensor) -> None:
    round.model.train()
    plain(round, x, y)


def every_module(round: Any, x: Tensor, y: Tensor) -> None:
    for module in round.model.modules():
        module.train()
    plain(round, x, y)


def by_attribute(round: Any, x: Tensor, y: Tensor) -> None:
    for module in round.model.modules():
        module.training = True
    plain(round, x, y)


def there_and_back(round: Any, x: Tensor, y: Tensor) -> None:
    """As trainers do around a validation."""
    modes = {module: module.training for module in round.model.modules()}
    round.model.eval()
    with torch.no_grad():
        round.model(x)
    for module, mode in modes.items():
        module.training = mode
    round.model.train()
    plain(round, x, y)


def compiled(round: Any, x: Tensor, y: Tensor) -> None:
    step(torch.compile(round.model, backend="eager"), round.model, x, y)


pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch.compile, about its own
LOOPS = [train, every_module, by_attribute, there_and_back, compiled]


@pytest.mark.parametrize(("method", "loop", "door"), cells(METHODS, LOOPS, train))
def test_a_loop_cannot_thaw(method: str, loop: Any, door: str) -> None:
    found = DOORS[door](net(), METHODS[method], clients(), loop, 3)
    want = DOORS[door](net(), METHODS[method], clients(), plain, 3)
    assert apart(found, want) <= (1e-12 if loop is compiled else 0)
    for name in (f"{layer}.{key}" for layer in batch_norms(net()) for key in ("running_mean", "running_var")):
        assert torch.equal(found[1][name], found[2][name])
        assert method == "hbn" or torch.equal(found[0][name], found[1][name])  # HBN's are measured anew before an evaluation
    assert apart(found[1:], want[:-1]) > 1e-6  # the weights do learn


SCALE = ("1.weight", "1.bias", "4.weight", "4.bias")


@pytest.mark.parametrize("door", ["own loop", "federation"])
@pytest.mark.parametrize("what", ["affine", "both", "statistics"])
@pytest.mark.parametrize("optimizer", [name for name in SERVER_OPTIMIZERS if name != "fedavg"])
def test_no_server_optimizer_moves_a_frozen_scale(optimizer: str, what: str, door: str) -> None:
    """Momentum would step along a pseudo-gradient of 0, and FedACG would send the scale ahead of itself."""
    method, sent = methods.fixbn(freeze_after=2, freeze_what=what), list[dict[str, Tensor]]()
    made = server_optimizer(optimizer, **({} if optimizer == "fedacg" else {"learning_rate": 0.1}))
    if door == "own loop":

        def note(state: Any) -> Any:
            sent.append(state.instruction().sections["weights"])
            return state

        found = DOORS[door](net(), method, clients(), plain, 4, optimizer=made, between=note)
    else:
        federation = Federation(net(), method, [[batch] for batch in clients()], server_optimizer=made, progress=False)
        found = [copy.deepcopy(federation.server.shared.tensors()) for _ in federation.run(4)]
    for one in [*found[2:], *(sent[1:] if what != "statistics" else [])]:
        for name in SCALE:
            assert torch.equal(one[name], found[1][name]) == (what != "statistics"), name  # control: else it moves
        assert not torch.equal(found[0]["1.weight"], found[1]["1.weight"])  # control: it learned before
    assert not torch.equal(found[2]["0.weight"], found[1]["0.weight"])


def test_eval_alone_would_thaw() -> None:
    """Control: the mode of a module, which is all that torch has for it, does not survive the same loop."""
    model = net().train()
    for layer in batch_norms(model).values():
        layer.eval()
    before = model[1].running_mean.clone()
    model.train()
    model(clients()[0][0])
    assert not torch.equal(model[1].running_mean, before)


class Restless(nn.Module):
    """Puts itself into training mode in every forward pass, as some wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules():
            module.training = True
        out: Tensor = self.body(x)
        return out


@pytest.mark.parametrize("method", METHODS)
def test_a_network_cannot_thaw_in_the_library_s_federation(method: str) -> None:
    def after(build: Any) -> dict[str, Tensor]:
        data = [[batch] for batch in clients()]
        federation = Federation(build, METHODS[method], data, calibrate=0, unit_scale=False, progress=False)
        _, first, last = [copy.deepcopy(federation.server.shared.tensors()) for _ in federation.run(3)]
        for name in (name for name in first if name.endswith(("running_mean", "running_var"))):
            assert torch.equal(first[name], last[name])
        return {name.removeprefix("body."): tensor for name, tensor in last.items()}

    assert apart([after(Restless())], [after(net())]) == 0


def test_statistics_that_are_set_in_a_frozen_round_are_an_error() -> None:
    method = methods.fixbn(freeze_after=0)
    model, asked = convert(net(), method), server_state(net(), method, rounds=2).instruction()
    with (
        pytest.raises(ValueError, match="BatchNorm layer '1' normalises with fixed statistics in round 1, but these changed"),
        local_round(model, method, asked),
    ):
        model[1].running_mean.add_(1)


@pytest.mark.parametrize("method", [methods.fbn(), methods.hbn(lam=0.1)], ids=lambda method: str(method.name))
@pytest.mark.parametrize("change", ["update_bn", "reset", "load", "nothing"])
def test_shared_statistics_that_the_loop_sets_are_an_error(method: Method, change: str) -> None:
    """FBN and HBN normalise with the server's statistics for the whole round."""
    before = net()
    before[1].running_mean.fill_(2)
    model, asked = convert(before, method), server_state(before, method, rounds=2).instruction()

    def loop() -> None:
        with local_round(model, method, asked) as round:
            if method.name == "hbn":
                round.measure(clients())
            plain(round, *clients()[0])
            if change == "update_bn":
                torch.optim.swa_utils.update_bn(clients(), round.model)
            elif change == "reset":
                model[1].reset_running_stats()
            elif change == "load":
                model.load_state_dict({**model.state_dict(), "1.running_mean": torch.ones(8)})

    if change == "nothing":
        loop()
        return
    with pytest.raises(ValueError, match="BatchNorm layer '1' normalises with fixed statistics in round 1, but these changed: .*update_bn"):
        loop()


@pytest.mark.parametrize("what", ["affine", "both"])
def test_frozen_scales_that_the_loop_lets_learn_are_an_error(what: str) -> None:
    method = methods.fixbn(freeze_after=0, freeze_what=what)
    model, asked = convert(net(), method), server_state(net(), method, rounds=2).instruction()

    def loop(learns: bool) -> None:
        with local_round(model, method, asked) as round:
            if learns:
                round.model.requires_grad_(True)
            plain(round, *clients()[0])

    with pytest.raises(ValueError, match=r"fixbn freezes parameter 1\.weight in round 1, but its values changed"):
        loop(learns=True)
    loop(learns=False)  # and gradients that are left from the round before move nothing


def test_a_round_without_a_step_of_its_model_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual slip: the optimiser has the parameters of the network before ``convert``."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    said = "round.model saw batches, but no optimiser stepped a parameter of round.model"
    for slip in (True, False):
        caplog.clear()
        mine, method = net(), methods.fedavg()
        with local_round(convert(mine, method), method, server_state(mine, method, rounds=2).instruction()) as round:
            optimizer = torch.optim.SGD((mine if slip else round.model).parameters(), 0.1)
            round.model(clients()[0][0]).square().mean().backward()
            optimizer.step()
        assert (said in caplog.text) is slip


def test_a_model_that_serves_several_clients_starts_each_with_mixing_logits_of_0() -> None:
    method, state = methods.hbn(), server_state(net(), methods.hbn(), rounds=2, clients=2)

    def second(first: nn.Module, other: nn.Module) -> dict[str, Tensor]:
        for model, data in ((first, clients()[0]), (other, clients()[1])):
            with local_round(model, method, state.instruction()) as round:
                round.measure([data])
                round.model.zero_grad()
                plain(round, *data)
        return round.reply(8)[0].sections["weights"]

    one, found = convert(net(), method), convert(net(), method)
    assert apart([second(one, one)], [second(found, convert(net(), method))]) == 0


def test_a_layer_that_is_replaced_in_a_round_is_an_error() -> None:
    method = methods.fbn()
    model, asked = convert(net(), method), server_state(net(), method, rounds=2).instruction()
    with pytest.raises(ValueError, match="layer '1' of round.model was replaced during round 1"), local_round(model, method, asked):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)


@pytest.mark.parametrize("method", [freeze(methods.fedbn(), 1), methods.fixbn(freeze_after=1), methods.silobn()], ids=lambda m: m.name)
def test_a_pass_between_the_block_and_the_reply_moves_no_frozen_statistics(method: Method) -> None:
    state, kept, (x, y) = server_state(net(), method, rounds=2), NOTHING, clients()[0]
    for number in (1, 2):
        with local_round(convert(net(), method), method, state.instruction(), kept) as round:
            before = {name: tensor.clone() for name, tensor in round.model.state_dict().items() if "running" in name}
            plain(round, x, y)
        with torch.no_grad():
            round.model(x + 100)
        reply, kept = round.reply(8)
        after = round.model.state_dict()
        moved = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
        assert bool(moved) is (number == 1 or method.name == "silobn")  # control: where they are not frozen, they move
        state, _ = server_round(state, [reply])


def test_layers_thaw_when_the_round_is_over() -> None:
    method = methods.fixbn(freeze_after=0)
    model, asked = convert(net(), method), server_state(net(), method, rounds=2).instruction()
    with local_round(model, method, asked):
        copied = copy.deepcopy(model)  # of an average of the weights, say
        assert not model[1].training
    assert type(model[1]) is nn.BatchNorm1d
    assert model[1].training
    assert not copied.train()[1].training  # as the round was
    assert convert(copied, methods.fedavg()).train()[1].training
