"""Door 1: an optimiser or scheduler that cannot be stepped once per batch is refused, or warned of, before round 1."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, NAdam, Rprop, SparseAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR

from fl_bn import Federation, local_round, methods, per_client, server_state
from fl_bn.conversion import convert


def federation(model: nn.Module | None = None, x: Callable[[], Tensor] = lambda: torch.randn(8, 4), **options: Any) -> Federation:
    model = model or nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    clients = [[(x(), torch.randint(0, 2, (8,)))] for _ in range(2)]
    return Federation(model, methods.fedavg(), clients, progress=False, workers=1, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"optimizer": LBFGS},
            r"optimizer makes LBFGS, whose step\(\) needs a closure, but Federation calls step\(\) without .* each batch: take SGD",
        ),
        ({"optimizer": per_client([SGD, LBFGS])}, r"optimizer makes LBFGS, whose step\(\) needs a closure"),
        ({"optimizer": SparseAdam}, "optimizer makes SparseAdam, which needs sparse gradients, but the gradient of 0.weight is dense"),
        ({"scheduler": ReduceLROnPlateau}, r"scheduler makes ReduceLROnPlateau, whose step\(\) needs a metrics, but .* such as StepLR"),
        ({"scheduler": per_client([None, ReduceLROnPlateau])}, "scheduler makes ReduceLROnPlateau"),
    ],
)
def test_what_needs_more_than_a_step_per_batch_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        federation(**options)


@pytest.mark.parametrize("optimizer", [SGD, Adam, NAdam, Rprop])
@pytest.mark.parametrize(
    "scheduler", [None, partial(StepLR, step_size=1), partial(CosineAnnealingLR, T_max=2), partial(OneCycleLR, max_lr=0.1, total_steps=9)]
)
def test_others_train(optimizer: Any, scheduler: Any) -> None:
    if scheduler is not None and scheduler.func is OneCycleLR and optimizer is Rprop:
        return  # torch refuses it: Rprop has no momentum
    assert [record.aggregated for record in federation(optimizer=optimizer, scheduler=scheduler).run(1)] == [True]


def test_a_maker_may_make_no_scheduler() -> None:
    assert [record.aggregated for record in federation(scheduler=lambda optimizer: None).run(1)] == [True]


def test_a_scheduler_that_nobody_steps_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)

    def both(parameters: Iterable[nn.Parameter]) -> SGD:
        optimizer = SGD(parameters, lr=0.1)
        StepLR(optimizer, step_size=1)
        return optimizer

    federation(optimizer=partial(SGD, lr=0.1), scheduler=partial(StepLR, step_size=1))
    assert "scheduler" not in caplog.text  # control
    federation(optimizer=both)
    assert "also makes a scheduler for its SGD, which Federation does not step: give the scheduler as scheduler=" in caplog.text


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(20, 2, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.words(x)
        return out


def test_sparse_adam_trains_a_network_of_sparse_gradients() -> None:
    made = federation(Sparse(), lambda: torch.randint(0, 20, (8, 3)), optimizer=SparseAdam)
    assert [record.aggregated for record in made.run(1)] == [True]


def test_lbfgs_trains_in_a_loop_of_one_s_own() -> None:
    net, method = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), methods.fedavg()
    with local_round(convert(net, method), method, server_state(net, method, rounds=1).instruction()) as round:
        optimizer, x = LBFGS(round.model.parameters(), max_iter=2), torch.randn(8, 4)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = round.model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert round.reply(8)[0].steps == 1
