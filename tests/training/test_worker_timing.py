"""Worker processes start by themselves where they save time, and only there."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import Federation, SeededBatches, methods
from fl_bn.federation.engines import workers as engine
from fl_bn.federation.engines.workers import WorkerTiming
from fl_bn.flower import in_process
from tests.listed import listed
from tests.refusals import naming


@listed(
    ("workers", "rounds", "seconds", "expected"),
    [
        pytest.param(2, 100, [1.0, 1.0], True, id="49 seconds saved"),
        pytest.param(1, 100, [1.0, 1.0], False, id="one core"),
        pytest.param(2, 3, [60.0, 60.0], True, id="the last round is long enough"),
        pytest.param(2, 100, [1.0], False, id="the first round alone says nothing"),
        pytest.param(2, 100, [0.1, 0.1], False, id="4.9 seconds saved"),
        pytest.param(8, 100, [0.1, 0.1], True, id="8.6 seconds saved by eight"),
        pytest.param(2, 100, [60.0, 0.1], False, id="the last round counts"),
    ],
)
def test_workers_start_where_they_save_more_than_they_cost(workers: int, rounds: int, seconds: list[float], expected: bool) -> None:
    watched = WorkerTiming(workers, rounds)
    for round, took in enumerate(seconds, 1):
        watched.note(round, took / 4)
        watched.note(round, took * 3 / 4)  # a round's clients, one by one
    assert watched.worth_it(len(seconds) + 1) is expected


@pytest.mark.parametrize(
    ("device", "gpu", "watched"), [("auto", False, True), ("cpu", True, True), ("auto", True, False), ("cuda", True, False)]
)
def test_a_run_on_a_gpu_starts_no_workers_by_itself(device: str, gpu: bool, watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes without MPS take turns on a GPU: eleven rounds a second were left of sixty on an H100."""
    given = []

    def grid(*arguments: object) -> None:
        given.append(arguments[-1])
        raise InterruptedError

    monkeypatch.setattr(in_process, "InProcessGrid", grid)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(InterruptedError):
        in_process.run_in_process({"clients": 2, "rounds": 100, "workers": 0, "device": device})
    assert (given[0] is not None) is watched


X, Y = torch.randn(8, 3), torch.randint(0, 2, (8,))


def federation(client: object, **options: object) -> Federation:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return Federation(net, methods.fedavg(), [client, SeededBatches(X, Y, 4)], **options)  # type: ignore[list-item, arg-type]


def on_two_cores(monkeypatch: pytest.MonkeyPatch, worth: bool = True) -> None:
    monkeypatch.setattr(engine, "START", -1e6 if worth else 1e6)
    monkeypatch.setattr("fl_bn.federation.engines.local.cores", lambda: 2)


@pytest.mark.slow
@pytest.mark.parametrize("worth", [True, False])
def test_a_federation_goes_on_in_workers_with_the_same_bits(worth: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    on_two_cores(monkeypatch, worth)
    ends = {}
    for workers in (0, 1):
        torch.manual_seed(0)
        fed = federation(DataLoader(TensorDataset(X, Y), 4, shuffle=True), workers=workers)
        begun = [fed._transport._workers is not None for _ in fed.run(4)]
        assert begun == [False, False, worth and not workers, worth and not workers]
        ends[workers] = fed.model.state_dict()
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.parametrize("workers", [0, 2])
def test_what_cannot_be_moved_is_said_in_one_sentence(
    workers: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_two_cores(monkeypatch)
    lock = threading.Lock()
    fed = federation(SeededBatches(X, Y, 4), workers=workers, optimizer=lambda parameters: SGD(parameters, lr=0.1 if lock else 0))
    with caplog.at_level("INFO"), nullcontext() if workers == 0 else naming("cannot be moved"):
        assert len(list(fed.run(4))) == 4
    assert caplog.text.count("cannot be moved") == (workers == 0)
