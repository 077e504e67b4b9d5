"""What public reports, other people's apps and attacks broke: one case each, with the right value from plain PyTorch or float64.

The letters are those of the cases. Every test failed before its case was mended (ed712ff). Of the others, A is in
``doors/test_loaders.py``, E in ``doors/test_one_sample.py``, G in ``packaging/test_new.py`` and ``newest``, M in ``test_durable.py``,
R in ``loops/test_frozen.py``; F, Q, S and T are pages (statistics, contract, fine-tune, byzantine).
"""

from __future__ import annotations

import copy
import math
import pickle
import threading
import tomllib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from flwr.app import Context, Message, MetricRecord
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from torch import Tensor, nn
from typer.testing import CliRunner

from fl_bn import Federation, methods, per_client
from fl_bn.app.config import ConfigError, RunConfig
from fl_bn.app.sweep.file import read
from fl_bn.cli.main import app as command
from fl_bn.federation.aggregation import Defence
from fl_bn.federation.run import Diverged
from fl_bn.flower import FBN, FedBN, InProcessGrid, RunFailed, legacy_client_app, legacy_server_app, run_in_process
from fl_bn.flower.compat import has_ended
from tests.conformance.doors import SIZES, Asked, Client, network
from tests.flower.own_apps import CLIENTS, client_of, own_app
from tests.flower.own_apps import net as own_net
from tests.listed import listed
from tests.networks import Wired

Batch = tuple[Tensor, Tensor]


def net(inputs: int = 3, classes: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))


def clients(inputs: int = 3, number: int = 3) -> list[list[Batch]]:
    draw = torch.Generator().manual_seed(1)
    return [[(x, (x[:, 0] > 0).long()) for x in torch.randn(2, 16, inputs, generator=draw)] for _ in range(number)]


def run(app: Any, strategy: Any, rounds: int = 2, evaluate_fn: Any = None, **given: Any) -> Any:
    torch.manual_seed(0)
    return strategy(own_net(), **given).start(InProcessGrid(app, CLIENTS, {}), num_rounds=rounds, evaluate_fn=evaluate_fn)


def losses(network: nn.Module, method: Any, data: Sequence[Any], rounds: int = 3, **given: Any) -> list[float]:
    return [record.loss for record in Federation(network, method, data, **given).run(rounds)]


# Networks and data


def test_b_sync_batch_norm_trains_like_the_layer_that_it_replaced() -> None:
    data, plain = clients(300), net(300)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    assert losses(synced, methods.fbn(), data) == losses(plain, methods.fbn(), data)
    assert losses(synced, methods.fbn(), data) != losses(synced, methods.fbn(), data, unit_scale=False)  # control


def test_c_a_metric_that_torchmetrics_calls_undefined_is_missing() -> None:
    data = clients()
    data[0] = [(x, torch.zeros_like(y)) for x, y in data[0]]
    auc = torchmetrics.AUROC("multiclass", num_classes=2)
    fed = Federation(net(), methods.fbn(), data, metrics={"auc": auc}, test=per_client(data))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (record,) = fed.run(1)
    right = []
    for own in data[1:]:
        x, y = (torch.cat(parts) for parts in zip(*own, strict=True))
        right.append(float(torchmetrics.functional.auroc(fed.model.eval()(x), y, "multiclass", num_classes=2)))
    assert record.evaluation["auc"] == pytest.approx(np.mean(right))
    assert math.isnan(record.client_evaluation[0]["auc"])


def test_d_clients_that_differ_in_an_exchange_are_named_with_the_layer_of_each() -> None:
    """The BatchNorm layer is called once per step of the sequence."""
    data = [[(torch.randn(8, length, 2), torch.arange(8) % 2)] for length in (3, 5, 5)]
    recurrent = Wired(
        lambda net, x: net.head(torch.stack([net.norm(step) for step in x.unbind(1)]).mean(0)), norm=nn.BatchNorm1d(2), head=nn.Linear(2, 2)
    )
    for order in (data, data[:2], data[1::-1]):  # client 0 against two others; one against one
        with pytest.raises(Diverged, match=r"client 0.* norm .*client 1.* norm .*same layers in the same order"):
            list(Federation(recurrent, methods.fedtan(), order).run(3))


# What clients say, and what is printed


def test_j_a_mod_of_the_whole_app_finds_the_round_in_every_message() -> None:
    seen = set[tuple[str, int]]()

    def mod(message: Message, context: Context, handle: Callable[[Message, Context], Message]) -> Message:
        seen.add((message.metadata.message_type, int(message.content["config"]["server-round"])))
        return handle(message, context)

    run(own_app("fedbn", mods=([mod], [], []), tells=True), FedBN, evaluate_fn=lambda number, arrays: None)
    assert {kind for kind, _ in seen} == {"query.hello", "query.kept", "train", "evaluate"}
    assert max(number for kind, number in seen if kind == "train") == 2


def test_h_the_end_of_a_simulation_is_the_stop_event_of_the_server_app_s_thread() -> None:
    stop, told, grid = threading.Event(), list[bool](), type("InMemoryGrid", (), {})()  # the name of Flower's
    for end in (False, True):
        if end:
            stop.set()
        for seen in (grid, object()):
            (thread := threading.Thread(target=lambda stop, seen: told.append(has_ended(seen)), args=(stop, seen))).start()
            thread.join()
    assert told == [False, False, True, False]


@listed("value", [True, "0.9", None, [0.5, True]])
def test_k_a_metric_that_cannot_be_sent_is_named_at_the_client(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RunFailed, match="client 0.*metric 'mine': expected a number"):
        run(own_app("fbn", metrics=lambda loss, client: {"fine": 0.5, "mine": value}), FBN)
    assert caplog.text.count("Traceback") == 1


def test_i_an_app_of_the_older_api_gets_its_number_and_gives_its_results() -> None:
    """``client_fn`` takes the number alone, as a text. Clients are told apart by their numbers of samples."""

    def server_fn(context: Context) -> ServerAppComponents:
        told: dict[str, Any] = {"fit_metrics_aggregation_fn": lambda metrics: {"samples": sorted(n for n, _ in metrics)}}
        strategy = FedAvg(fraction_evaluate=0.0, on_fit_config_fn=lambda round: {"lr": 0.1}, **told)
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))

    server = legacy_server_app(server_fn, network, methods.fedavg())
    client = legacy_client_app(lambda cid: Client(int(cid), Asked("fedavg"), [], {}).to_client(), methods.fedavg())
    history = run_in_process({"clients": CLIENTS}, server_app=server, client_app=client)
    samples = sorted(map(sum, SIZES))
    assert pickle.loads(pickle.dumps(history)).metrics_distributed_fit["samples"] == [(1, samples), (2, samples)]


@pytest.mark.parametrize(("liars", "defence"), [((0, 1), None), ((0,), Defence(1, "median", "median"))], ids=["mean", "defence"])
def test_l_far_clients_are_named_and_a_defence_shows_the_median(liars: Any, defence: Any, caplog: pytest.LogCaptureFixture) -> None:
    def lie(message: Message, context: Context, reply: Message) -> None:
        reply.content["fl-bn/metrics"]["loss"] = -1e300 if client_of(context) in liars else 0.7

    record = run(own_app("fbn", after=lie), FBN, rounds=1, **({"defence": defence} if defence else {})).records[-1]
    assert ", ".join(f"client {liar} says a loss of -1e+300" for liar in liars) in caplog.text
    assert defence is None or record.loss == pytest.approx(0.7)


def test_p_one_name_for_one_number_and_flower_s_summary_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    app = own_app("fbn", evaluated=lambda loss, client: {"loss": loss, "num-examples": 8})
    result = run(app, FBN, rounds=1, evaluate_fn=lambda number, arrays: MetricRecord({"central": float(number)}))
    told = [record.getMessage().strip() for record in caplog.records]
    (line,) = [line for line in told if line.startswith("[round 1/1]")]
    assert f" loss {result.records[0].loss:.4f} " in line
    assert f" test-loss {result.evaluate_metrics_clientapp[1]['loss']:.4g} " in line
    assert line.count(" loss ") == 1
    end = [line.strip() for line in str(result).splitlines()]
    assert told[-len(end) :] == end
    assert "'central': '1.0000e+00'" in " ".join(end)


INVISIBLE = [*"\u200b\u202e\u2066\u3164\u034f\ufe0f\u2800\u00ad\uffa0", "\U000e0100"]
TEXTS = [key for key, value in RunConfig().to_mapping().items() if isinstance(value, str)]


@listed("character", INVISIBLE, ids=ascii)
def test_n_no_key_takes_a_character_that_cannot_be_seen(character: str) -> None:
    for key in TEXTS:
        with pytest.raises(ConfigError) as told:
            RunConfig.from_mapping({key: f"a{character}b"})
        assert character not in str(told.value)
    RunConfig.from_mapping({"name": "\u0639\u0631\u0628 e\u0301 \u6f22"})  # control: of any language


def test_n_the_draft_of_columns_escapes_it_and_is_read_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\u202eb,c\u3164,y\n1,x\u200b,0\n2,z,1\n3,z,1\n", encoding="utf-8")
    text = CliRunner().invoke(command, ["data", "columns", str(tmp_path), "--target", "y"]).stdout
    assert not any(character in text for character in INVISIBLE)
    drafted = tomllib.loads(text)
    assert [*drafted["numeric"], *drafted["categorical"]] == ["a\u202eb", "c\u3164"]


def test_n_a_sweep_file_has_no_such_text(tmp_path: Path) -> None:
    for text in ('title = "a\u2066b"', '[axes.m]\n"a\u200bb" = { rounds = 1 }'):
        (tmp_path / "s.toml").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"s.toml: texts must have no invisible characters, but one has .u20"):
            read(tmp_path / "s.toml")


def fed(targets: Any, samples: int = 6, **given: Any) -> None:
    try:
        list(Federation(net(), methods.fbn(), [[(torch.randn(samples, 3), targets)]] * 2, **given).run(1))
    except ValueError as error:
        raise ValueError(f"{error} {' '.join(error.__notes__)}") from error


def said_by(*arguments: str) -> None:
    raise ValueError(" ".join(CliRunner().invoke(command, arguments).output.replace("\u2502", " ").split()))


def archive(folder: Path, labels: Any, dtype: Any = np.uint8) -> None:
    x = np.ones((6, 4, 4), dtype)
    x[0, 0] = math.nan if dtype == np.float32 else 0
    np.savez(folder / "a.npz", x_train=x, y_train=np.arange(6) % 2, x_test=x, y_test=labels)
    said_by("run", "--run-config", f"dataset='npz' data-path='{folder}/a.npz' clients=2 rounds=1")


def test_o_a_run_of_0_rounds_leaves_the_statistics_of_all_data_in_the_model() -> None:
    data = clients()
    fed = Federation(net(), methods.fbn(), data)
    assert list(fed.run(0)) == []
    x = torch.cat([x for own in data for x, _ in own])
    assert torch.allclose(fed.model[1].running_mean, net()[0](x).mean(0), atol=1e-6)


@listed(
    "wrong, words",
    [
        (lambda folder: fed(torch.arange(6) % 3), "scores the classes 0..1, but a label is 2"),
        (lambda folder: fed(torch.arange(0), 0), "a round's first batch must have at least 1 sample.*but got 0 samples"),
        (lambda folder: fed(torch.arange(6) % 2, test=[(torch.randn(3, 3), torch.arange(3))]), "a label is 2.*at client 0, in its test"),
        (lambda folder: fed(["cat", "dog"] * 3), "labels.* but got .'cat', 'dog'"),
        (lambda folder: archive(folder, np.arange(6) % 3), "a.npz.*no training sample has label 2"),
        (lambda folder: archive(folder, np.arange(6) % 2, np.float32), "a.npz, x_train: .*float32 with NaN"),
        (lambda folder: said_by("advise", "/nowhere"), "no file or folder '/nowhere'"),
        (lambda folder: said_by("run", "--run-config", "dataset='npz:x.npz'"), "dataset='npz' and data-path='x.npz'"),
        (lambda folder: said_by("run", "rounds=2"), '--run-config "rounds=2"'),
        (lambda folder: [(folder / "sweep.toml").touch(), said_by("report", str(folder), "--output", "x")], "--output is for several runs"),
    ],
    ids=["label", "empty", "test label", "text", "npz label", "npz nan", "advise", "npz:", "run key", "report"],
)
def test_o_one_sentence_names_the_cause_and_the_place(wrong: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        wrong(tmp_path)
