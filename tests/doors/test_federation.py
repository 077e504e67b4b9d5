"""Door 1: any loader, network, task, optimiser and scheduler; what is recorded, saved and said."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fl_bn import Callback, Federation, Regression, SeededBatches, Task, methods
from fl_bn.federation.callbacks import Running
from fl_bn.federation.defence import Defence
from fl_bn.federation.federation import Diverged
from fl_bn.federation.optimizers import ServerOptimizer, server_optimizer
from fl_bn.federation.record import RoundRecord
from fl_bn.objectives import Moon, Scaffold
from tests.doors.doors import ALL, DOORS, apart, through, wide
from tests.federation import random_samples
from tests.methods.centralised import rough_network


def net(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, outputs))


def made(client: int, n: int = 48) -> tuple[Tensor, Tensor]:
    """Three classes that a linear map tells apart."""
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(client)) + 0.2 * client
    return x, x[:, :3].argmax(1)


CLIENTS = [made(client) for client in range(3)]
TEST = [made(9, 200)]
LOADERS = [DataLoader(TensorDataset(*client), batch_size=16, shuffle=True) for client in CLIENTS]
SEEDED = [SeededBatches(*client, 16) for client in CLIENTS]


class Dicts(Dataset[dict[str, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"left": self.x[index, :3], "right": self.x[index, 3:], "label": self.y[index]}


class TwoInputs(nn.Module):
    """Takes keyword arguments, and returns what ``shape`` says."""

    def __init__(self, shape: type) -> None:
        super().__init__()
        self.net, self.shape = net(), shape

    def forward(self, left: Tensor, right: Tensor) -> object:
        logits = self.net(torch.cat([left, right], 1))
        return {"logits": logits, "features": left} if self.shape is dict else (logits, left)


@pytest.mark.parametrize("shape", [dict, tuple])
@pytest.mark.parametrize("method", ["fixbn", "hbn", "fbn", "fedtan", "fedbn"])
def test_loaders_of_dicts_and_networks_of_several_outputs(method: str, shape: type) -> None:
    loaders = [DataLoader(Dicts(*client), batch_size=16, shuffle=True) for client in CLIENTS]
    fed = Federation(TwoInputs(shape), methods.METHODS[method](), loaders, test=DataLoader(Dicts(*TEST[0]), batch_size=64), progress=False)
    records = list(fed.run(4))
    assert records[-1].evaluation["loss"] < records[0].evaluation["loss"]
    assert all(record.aggregated for record in records)


@pytest.mark.parametrize("batches", [LOADERS, [[client] for client in CLIENTS], SEEDED], ids=["loader", "list", "seeded"])
def test_adamw_with_a_scheduler(batches: list) -> None:
    fed = Federation(
        net(),
        methods.fixbn(),
        batches,
        test=TEST,
        optimizer=partial(AdamW, lr=0.01),
        scheduler=partial(CosineAnnealingLR, T_max=6),
        schedule=lambda round, rounds: 1 - (round - 1) / rounds,
        local_epochs=2,
        progress=False,
    )
    first, *_, last = fed.run(6)
    assert last.evaluation["loss"] < first.evaluation["loss"]
    rates = [min(0.01 * (1 - n / 6), 0.001 if n >= 3 else 1) for n in range(6)]  # FixBN is frozen then
    assert [record.learning_rate for record in fed.history] == pytest.approx(rates)


class Grades(Task):
    """Labels are grades, the network has one output."""

    name, metric, higher_is_better = "grades", "mae", False

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.smooth_l1_loss(output.squeeze(1), targets.float())

    def sums(self, output: Tensor, targets: Tensor) -> Mapping[str, Tensor | float]:
        return {"error": (output.squeeze(1) - targets).abs().sum(), "samples": len(targets)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {"mae": float(sums["error"] / sums["samples"])}


@pytest.mark.parametrize("task", [Grades(), Regression()])
def test_a_task_of_one_s_own(task: Task) -> None:
    loaders, test = LOADERS, TEST
    if isinstance(task, Regression):
        loaders, test = [[(x, x[:, :1])] for x, _ in CLIENTS], [(TEST[0][0], TEST[0][0][:, :1])]
    fed = Federation(net(1), methods.fbn(), loaders, task=task, test=test, optimizer=partial(SGD, lr=0.01), progress=False)
    first, *_, last = fed.run(10)
    assert last.evaluation["loss"] < first.evaluation["loss"]
    assert task.metric in last.evaluation


@pytest.mark.parametrize(("terminal", "wanted"), [(True, True), (False, True), (True, False)])
def test_a_progress_bar_on_a_terminal_alone(terminal: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(said, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", said)
    list(Federation(net(), methods.fixbn(), SEEDED, test=TEST, progress=wanted).run(2))
    assert ("2/2" in said.getvalue()) == (terminal and wanted)


def test_history_has_every_round() -> None:
    fed = Federation(net(), methods.fixbn(), SEEDED, test=TEST, evaluate_every=2, fraction=0.67, progress=False)
    seen = list(fed.run(3))
    assert fed.history == seen
    assert [record.round for record in seen] == [1, 2, 3]
    assert [bool(record.evaluation) for record in seen] == [False, True, True]
    assert [len(record.clients) for record in seen] == [2, 2, 2]
    assert [record.phase for record in seen] == ["train", "frozen", "frozen"]
    assert all(client.samples == 48 and client.steps == 3 for record in seen for client in record.clients)


class Ends(Callback):
    """Notes the model of each evaluation, and ends the run after round 5: by ``stop`` or by an error."""

    def __init__(self, by: str) -> None:
        self.by, self.evaluated = by, dict[int, dict[str, Tensor]]()

    def on_start(self, running: Running) -> None:
        self.running = running

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        self.evaluated[record.round] = dict(self.running.arrays())

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        if record.round == 5 and self.by == "stop":
            self.running.stop("time is up")
        if record.round == 5 and self.by == "error":
            raise KeyboardInterrupt


@pytest.mark.parametrize("by", ["stop", "error", "break", "a look"])
@pytest.mark.parametrize("name", ["static-bn", "hbn", "fbn", "fixbn"])
def test_the_model_is_one_that_was_evaluated_where_statistics_are_measured(name: str, by: str, log: pytest.LogCaptureFixture) -> None:
    """Else static BN's would have mean 0 and variance 1, and HBN's the statistics of another exchange."""
    notes, method = Ends(by), methods.METHODS[name]()
    fed = Federation(net(), method, SEEDED, test=TEST, evaluate_every=2, callbacks=[notes], progress=False)
    going = fed.run(8)
    with pytest.raises(KeyboardInterrupt) if by == "error" else nullcontext():
        for record in going:
            if record.round == 5 and by in ("break", "a look"):
                break
    if by == "break":
        going.close()  # type: ignore[attr-defined]
    found, measures = fed.model.state_dict(), name in ("static-bn", "hbn")
    same = [key for key, tensor in notes.evaluated[4].items() if "tracked" not in key and torch.equal(found[key], tensor)]
    assert (len(same) > 4) == measures  # control: the others' weights are those of round 5
    assert not torch.equal(found["1.running_mean"], torch.zeros(16))
    last = fed.history[3].evaluation["loss"]
    assert (fed.evaluate()["loss"] == pytest.approx(last, abs=1e-6)) == measures
    said = f"the run ends after round 5, but its model is that of round 4, the last evaluation: {name} measures statistics"
    assert (said in log.text) == (measures and by != "a look")


@pytest.mark.parametrize("name", ["static-bn", "hbn"])
def test_without_an_evaluation_it_is_the_one_before_round_1(name: str, log: pytest.LogCaptureFixture) -> None:
    notes = Ends("stop")
    fed = Federation(net(), methods.METHODS[name](), SEEDED, test=TEST, evaluate_every=6, callbacks=[notes], progress=False)
    list(fed.run(8))
    assert torch.equal(fed.model.state_dict()["3.weight"], net().state_dict()["3.weight"])
    assert "the run ends after round 5, but its model is that before round 1, since no round was evaluated" in log.text


@pytest.mark.parametrize("name", ["static-bn", "hbn", "fbn"])
def test_a_resumed_run_has_the_model_of_the_last_evaluation(name: str, tmp_path: Path) -> None:
    def made(by: str) -> Federation:
        return Federation(net(), methods.METHODS[name](), SEEDED, test=TEST, evaluate_every=2, callbacks=[Ends(by)], progress=False)

    whole, saved, resumed = made("stop"), made(""), made("stop")
    list(whole.run(8))
    for record in saved.run(8):
        if record.round == 4:
            saved.checkpoint(tmp_path / "state")
            break
    resumed.resume(tmp_path / "state")
    list(resumed.run(8))
    assert apart([dict(resumed.model.state_dict())], [dict(whole.model.state_dict())]) == 0


@pytest.mark.parametrize("method", ["fixbn", "fbn", "hbn", "fedtan"])
def test_what_is_saved_loads_into_the_unconverted_network(method: str, tmp_path: Path) -> None:
    fed = Federation(net(), methods.METHODS[method](), SEEDED, test=TEST, progress=False)
    list(fed.run(4))
    fed.save(tmp_path / "model.safetensors")
    plain = net()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    state = fed.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_file(tmp_path / "model.safetensors").items() if name in state)
    assert state.keys() - load_file(tmp_path / "model.safetensors").keys() <= {"1.mixing_logit"}
    if method != "hbn":  # whose own layers mix
        x, _ = TEST[0]
        assert torch.allclose(plain.eval()(x), fed.model(x), atol=1e-6)


def test_fedbn_s_clients_have_networks_of_their_own() -> None:
    fed = Federation(net(), methods.fedbn(), SEEDED, test=TEST, progress=False)
    list(fed.run(2))
    first, second = (fed.client_model(client).state_dict() for client in range(2))
    assert torch.equal(first["0.weight"], second["0.weight"])
    assert not torch.equal(first["1.running_mean"], second["1.running_mean"])


def test_a_client_starts_with_layers_of_its_own_not_with_its_neighbour_s() -> None:
    """FedBN, round 1: client 1 alone, and client 1 after client 0, train the same."""
    both = Federation(net(), methods.fedbn(), SEEDED, progress=False)
    other = Federation(net(), methods.fedbn(), [SeededBatches(*made(7), 16), SEEDED[1]], progress=False)
    list(both.run(1)), list(other.run(1))
    ours, theirs = both.client_model(1).state_dict(), other.client_model(1).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name.startswith("1."))
    assert not torch.equal(both.client_model(0).state_dict()["1.running_mean"], other.client_model(0).state_dict()["1.running_mean"])


@pytest.mark.parametrize("method", ["fixbn", "fbn"])
def test_a_federation_that_diverges_says_why(method: str) -> None:
    fed = Federation(net(), methods.METHODS[method](), SEEDED, optimizer=partial(SGD, lr=1e30), clip="none", progress=False)
    with pytest.raises(Diverged, match=r"3 rounds in a row .* The first reason: \w"):
        list(fed.run(10))
    assert [record.aggregated for record in fed.history[-3:]] == [False] * 3
    assert len(fed.history) < 10


def test_seeded_batches_repeat_bit_for_bit() -> None:
    ends = []
    for seed, drawn in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(drawn)  # whatever else draws random numbers
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
        model.load_state_dict(dict(zip(model.state_dict(), net().state_dict().values(), strict=True)))
        fed = Federation(model, methods.hbn(), SEEDED, test=TEST, local_epochs=2, fraction=0.67, seed=seed, progress=False)
        list(fed.run(3))
        ends.append(fed.model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not torch.equal(ends[0]["0.weight"], ends[2]["0.weight"])


@pytest.mark.parametrize("method", ["fixbn", "fedbn", "fbn", "fedtan", "gn"])
def test_the_same_bits_as_the_application(method: str) -> None:
    """The same batches, settings and seed. HBN's pass sums its batches in another order, so it is equal to rounding alone (test_parity)."""
    clients = wide([random_samples(n, seed=i) for i, n in enumerate((8, 13, 7))])
    model, method_here = rough_network("cnn"), methods.METHODS[method]()
    want = through(ALL["application"], model, method_here, clients, 3)
    assert apart(through(DOORS["federation"], model, method_here, clients, 3), want) == 0


def test_server_optimizer_and_defence_are_used() -> None:
    ends = {}
    for name, options in {
        "plain": {},
        "adam": {"server_optimizer": server_optimizer("fedadam", learning_rate=0.01)},
        "median": {"defence": Defence(1, "median", "median")},
    }.items():
        fed = Federation(net(), methods.fbn(), SEEDED, progress=False, **options)
        list(fed.run(2))
        ends[name] = fed.model.state_dict()["0.weight"]
    assert not torch.equal(ends["plain"], ends["adam"])
    assert not torch.equal(ends["plain"], ends["median"])


def of_two_runs(optimizer: ServerOptimizer, width: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))
    fed, ends = Federation(model, methods.fbn(), SEEDED, progress=False, server_optimizer=optimizer), []
    for _ in range(2):
        list(fed.run(2))
        ends.append(fed.model.state_dict()["0.weight"])
    return ends


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "fedacg"])
def test_a_server_optimizer_for_two_federations_has_a_memory_for_each(name: str) -> None:
    one = server_optimizer(name)
    first, again, fresh = of_two_runs(one), of_two_runs(one), of_two_runs(server_optimizer(name))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, again, fresh, strict=True))
    assert of_two_runs(one, width=5)[0].shape == (5, 6)  # torch cannot add the buffers of another network
    forgetting = of_two_runs(server_optimizer("fedavg"))
    assert not torch.equal(first[1], forgetting[1])  # control: within a federation it has a memory


def test_what_does_not_go_together_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="take another objective"):
        Federation(net(), methods.fedtan(), SEEDED, objective=Scaffold())
    with pytest.raises(ValueError, match="no robust rule guards them"):
        Federation(net(), methods.fbn(), SEEDED, objective=Scaffold(), defence=Defence(1, "median", "median"))
    with pytest.raises(ValueError, match="means of the gradients of plain SGD.*: take torch.optim.SGD without momentum"):
        Federation(net(), methods.fbn(), SEEDED, objective=Scaffold(), optimizer=partial(AdamW, lr=0.1))
    with pytest.raises(ValueError, match="a federation needs at least 1 client"):
        Federation(net(), methods.fbn(), [])


def test_the_network_given_is_not_changed() -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    list(Federation(model, methods.fbn(), SEEDED, progress=False).run(1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Breaks:
    """A loader, whose pass of a certain number ends in an error."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]], number: int) -> None:
        self.batches, self.left = batches, number

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.left -= 1
        for batch in self.batches:
            yield batch
            if not self.left:
                raise OSError("the disk is gone")


@pytest.mark.parametrize("breaks", [2, 0])  # 0: control
def test_a_moon_round_that_raises_leaves_no_hook(breaks: int) -> None:
    """The client's network is lent again, to rounds that are as if nothing had happened."""
    torch.manual_seed(0)
    batch = torch.randn(8, 4), torch.randint(0, 2, (8,))
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    fed = Federation(net, methods.fixbn(), [Breaks([batch, batch], breaks)], objective=Moon(), progress=False)
    with nullcontext() if not breaks else pytest.raises(OSError, match="the disk is gone"):
        list(fed.run(2))
    network = fed._transport.clients.network
    ((lent, _),) = network._back
    assert [len(module._forward_pre_hooks) for module in lent.model.modules()] == [0] * 5
    assert [record.aggregated for record in fed.run(2)] == [True, True]
    ((again, _),) = network._back
    assert again is lent
    assert [len(module._forward_pre_hooks) for module in again.model.modules()] == [0] * 5


@pytest.mark.parametrize(("fraction", "most"), [(0.1, 2), (1.0, 20)])
def test_copies_of_a_measurement_of_all_clients_are_let_go(fraction: float, most: int) -> None:
    """Layer by layer everyone has a copy at once; a round of training takes the cohort's at most."""
    clients = [SeededBatches(*made(client, 8), 4) for client in range(20)]
    deep = nn.Sequential(net(4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    fed = Federation(deep, methods.fbn(), clients, fraction=fraction, progress=False)
    (record,) = fed.run(1)
    assert record.aggregated
    assert len(fed._transport.clients.network._back) == most
