"""An error is reported as what it is: a user's exception, inputs that are not finite, or a rate that is too high. In every door."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from torch import Tensor
from torch.nn import functional as F

from fl_bn import Federation, convert, local_round, server_round, server_state
from fl_bn.federation.divergence import at_the_end, watch, why_failed
from fl_bn.federation.loaders import SeededBatches
from fl_bn.federation.local import Samples
from fl_bn.federation.record import ClientRecord, RoundRecord
from fl_bn.federation.run import Diverged
from fl_bn.federation.settings import LocalTraining
from fl_bn.flower import FBN, FedAvgBN, InProcessGrid, RunFailed
from fl_bn.methods import METHODS
from tests.flower.own_apps import CLIENTS, data, net, own_app
from tests.in_process import run

INPUTS = "values are not finite (NaN or Inf): its own inputs are not finite (a batch with NaN or Inf): clean this client's data"


def spoilt(client: int) -> list[tuple[Tensor, Tensor]]:
    batches = data(client)
    if client == 1:
        batches[0][0][2, 1] = math.nan
    return batches


def samples(client: int) -> Samples:
    return Samples(torch.cat([x for x, _ in spoilt(client)]), torch.cat([y for _, y in spoilt(client)]))


def test_a_user_s_exception_is_told_with_its_client_class_and_message(log: pytest.LogCaptureFixture) -> None:
    def before(message: Message, context: Context) -> None:
        {}["round"]  # noqa: B018

    with pytest.raises(RunFailed) as error:
        FedAvgBN(net(), fraction_evaluate=0).start(InProcessGrid(own_app("fedavg", before=before), CLIENTS, {}), num_rounds=5)
    assert "The first reason: client 0: error: code 2: KeyError: 'round'" in str(error.value)
    assert "learning rate" not in str(error.value)
    assert "learning rate" not in log.text


def test_a_short_run_tells_it_too() -> None:
    def before(message: Message, context: Context) -> None:
        raise ValueError("my loss: 3 values are not finite")

    with pytest.raises(RunFailed) as error:
        FedAvgBN(net(), fraction_evaluate=0).start(InProcessGrid(own_app("fedavg", before=before), CLIENTS, {}), num_rounds=1)
    assert "none of the 1 rounds had enough usable replies, so nothing was trained. The first reason: client 0: error: " in str(error.value)
    assert "diverged" not in str(error.value)  # these are the user's words


def own_door() -> str:
    result = FedAvgBN(net(), fraction_evaluate=0).start(InProcessGrid(own_app("fedavg", batches=spoilt), CLIENTS, {}), num_rounds=1)
    return str(result.records[0].clients[1].refused)


def federation_door(engine: str = "sequential") -> str:
    loaders: Any = [SeededBatches(samples(i).x, samples(i).y, 8) for i in range(CLIENTS)] if engine else [spoilt(i) for i in range(CLIENTS)]
    federation = Federation(net(), METHODS["fedavg"](), loaders, progress=False, engine=engine or "sequential")
    (record,) = federation.run(1)
    return record.clients[1].refused


def application_door() -> str:
    ran = run(METHODS["fedavg"](), [samples(i) for i in range(CLIENTS)], 1, settings=LocalTraining(batch_size=8, epochs=1), model=net())
    return ran.records[0].clients[1].refused


def loop_door() -> str:
    method = METHODS["fedavg"]()
    state, replies = server_state(net(), method, rounds=1, clients=CLIENTS), []
    for i in range(CLIENTS):
        with local_round(model := convert(net(), method), method, state.instruction()) as round:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in spoilt(i):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        replies.append(round.reply(samples=16, client=i)[0])
    return server_round(state, replies)[1].clients[1].refused


DOORS = {
    "own app": own_door,
    "application": application_door,
    "loop": loop_door,
    "federation": federation_door,
    "federation of lists": lambda: federation_door(""),
    "one program": lambda: federation_door("vectorised"),
}


@pytest.mark.parametrize("door", DOORS)
def test_inputs_that_are_not_finite_are_told_of_the_client_that_has_them(door: str) -> None:
    assert INPUTS in DOORS[door]()


def test_control_without_nan_nobody_s_inputs_are_blamed() -> None:
    """A client whose training diverged has finite inputs."""
    record = RoundRecord(1, "train", 0.1, [ClientRecord(0, refused="weights/a: 3 of 3 values are not finite (NaN or Inf)")])
    assert why_failed(record).endswith("Training diverged: lower the learning rate")


def test_a_federation_that_fails_says_whose_inputs() -> None:
    clients: Any = [[(torch.full((8, 4), math.nan), torch.zeros(8, dtype=torch.long))]] * 2
    with pytest.raises(Diverged) as error:
        list(Federation(net(), METHODS["fedavg"](), clients, progress=False).run(5))
    assert "its own inputs are not finite" in str(error.value)
    assert "lower the learning rate" not in str(error.value)


def test_a_run_that_ends_diverged_says_so(log: pytest.LogCaptureFixture) -> None:
    """As FBN at a rate that is far too high: a loss of hundreds, and a model of no use."""

    def says(loss: float, round: int) -> float:
        return 343.0 if round == 3 else loss

    FBN(net(), fraction_evaluate=0).start(InProcessGrid(own_app("fbn", says=says), CLIENTS, {}), num_rounds=3)
    assert "round 3: the training loss is 343, and was 1." in log.text
    assert "the run ends with a model that diverged (training loss 343): do not use it" in log.text
    log.clear()
    FBN(net(), fraction_evaluate=0).start(InProcessGrid(own_app("fbn"), CLIENTS, {}), num_rounds=3)
    assert "diverged" not in log.text  # control


def test_a_run_at_a_rate_that_is_far_too_high_fails_with_the_rate_as_its_reason() -> None:
    def shifted(client: int) -> list[tuple[Tensor, Tensor]]:
        return [(x * (1 + 20 * client) + 9 * client, y) for x, y in data(client)]

    far = own_app("fbn", batches=shifted, rate=lambda message: 30.0)
    with pytest.raises(RunFailed) as error:
        FBN(net(), fraction_evaluate=0, calibrate=0, unit_scale=False).start(InProcessGrid(far, CLIENTS, {}), num_rounds=3)
    assert "Training diverged: lower the learning rate" in str(error.value)


def record(loss: float, number: int = 3) -> RoundRecord:
    return RoundRecord(number, "train", 0.1, [ClientRecord(0, 8, 2, loss)], aggregated=True)


def test_what_counts_as_diverged() -> None:
    (warning,) = watch(record(343.0), 2.3)
    assert "training loss is 343, and was 2.3 in the first round: training diverged; lower the learning rate" in warning
    assert not [*watch(record(3.0), 2.3)]
    assert not [*watch(record(3.0), 0.01)]  # another cohort's loss may be so much larger
    assert at_the_end(record(math.nan), 2.3)
    assert not at_the_end(record(2.0), 2.3)


def test_a_federation_warns_too(log: pytest.LogCaptureFixture) -> None:
    from functools import partial

    clients: Any = [data(i) for i in range(CLIENTS)]
    federation = Federation(
        net(), METHODS["fedavg"](), clients, optimizer=partial(torch.optim.SGD, lr=1e4), clip="none", progress=False
    )
    list(federation.run(2))
    assert "the run ends, and the last 2 rounds did not change the model. The first reason: client 0: weights/" in log.text
    assert "Training diverged: lower the learning rate" in log.text
