"""Flower's quickstart app, before and after: few lines change, and every method runs in it."""

from __future__ import annotations

import difflib
import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from fl_bn.bn.roles import batch_norms
from fl_bn.federation import client as client_round
from fl_bn.flower import InProcessGrid
from fl_bn.flower.population import RunFailed
from tests.listed import listed

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart_flower"
PACKAGE = "quickstart"  # a top-level client_app would be another app's, where two run in one place
METHODS = {"fixbn": "FixBN", "fedbn": "FedBN", "hbn": "HBN", "fbn": "FBN", "fedtan": "FedTAN"}
CONFIG: dict[str, Any] = {"num-server-rounds": 3, "fraction-train": 1.0, "local-epochs": 1, "lr": 0.02}


def source(folder: str, file: str, method: str = "fixbn") -> str:
    text = (QUICKSTART / folder / PACKAGE / file).read_text()
    return text.replace("FixBN(", f"{METHODS[method]}(").replace("import FixBN", f"import {METHODS[method]}").replace("fixbn", method)


@contextmanager
def app_in(folder: Path) -> Iterator[tuple[Any, Any]]:
    """The ServerApp and the ClientApp of a folder, imported as Flower imports them."""
    ours = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == PACKAGE}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield tuple(importlib.import_module(f"{PACKAGE}.{name}").app for name in ("server_app", "client_app"))
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        sys.modules.update(ours)


def ran(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[int, dict[str, float]]:
    """The evaluations at the clients, by round."""
    with app_in(folder) as (server, client):
        torch.manual_seed(0)
        server(InProcessGrid(client, 5, CONFIG), Context(1, 0, {}, RecordDict(), dict(CONFIG)))
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    return {int(k): dict(v) for k, v in eval(printed, {"nan": math.nan}).items()}  # noqa: S307 - the example prints a dict


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(method: str, *, without: str = "") -> Path:
        (tmp_path / PACKAGE).mkdir(exist_ok=True)
        for file in ("__init__.py", "task.py", "client_app.py", "server_app.py"):
            lines = source("after", file, method).splitlines(keepends=True)
            (tmp_path / PACKAGE / file).write_text("".join(line for line in lines if not without or not line.startswith(without)))
        return tmp_path

    return write


def test_before_it_is_plain_flower(capsys: pytest.CaptureFixture[str]) -> None:
    found = ran(QUICKSTART / "before", capsys)
    assert set(found) == {1, 2, 3}
    assert 0 < found[3]["eval_acc"] <= 1


@pytest.mark.sample("[fedtan]")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_in_it(method: str, written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = ran(written(method), capsys)
    assert set(found) == {1, 2, 3}
    assert all(math.isfinite(metrics["eval_loss"]) for metrics in found.values())
    assert found[1]["eval_loss"] != found[3]["eval_loss"]


@listed(("file", "most"), [("client_app.py", 10), ("server_app.py", 5), ("task.py", 0)])
@listed("method", METHODS)
def test_few_lines_change(file: str, most: int, method: str) -> None:
    before, after = source("before", file).splitlines(), source("after", file, method).splitlines()
    changed = [line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[0] == "+" and not line.startswith("+++")]
    assert len([line for line in changed if not line.startswith('+"""')]) <= most


def test_an_app_without_the_line_is_told_which(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailed, match=r"add fl_bn.flower.answer\(app, Net, method, batches\)"):
        ran(written("fixbn", without="answer(app"), capsys)


def test_a_client_with_another_method_is_told(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written("fixbn")
    (folder / PACKAGE / "client_app.py").write_text(source("after", "client_app.py", "fbn"))
    with pytest.raises(RunFailed, match="another model, method, .*name the same unconverted network and method"):
        ran(folder, capsys)


def test_another_strategy_s_message_is_named(written: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    folder = written("fixbn")
    (folder / PACKAGE / "server_app.py").write_text(source("before", "server_app.py"))
    assert ran(folder, capsys) == {}  # Flower's own strategies go on without replies
    assert "use a strategy of fl_bn.flower in server_app.py" in caplog.text


def moved_in_frozen_rounds(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a client's statistics moved in its training, for every client and frozen round of six rounds."""
    moved: list[bool] = []
    with app_in(folder) as (server, client):
        module = sys.modules[f"{PACKAGE}.client_app"]
        own = module.train_fn

        def train_fn(net: Any, *args: Any) -> float:
            before = {k: t.clone() for k, t in net.state_dict().items() if "running" in k}
            frozen = not any(layer.training for layer in batch_norms(net).values())
            loss = own(net, *args)
            if frozen:
                moved.append(not all(torch.equal(t, net.state_dict()[k]) for k, t in before.items()))
            return float(loss)

        monkeypatch.setattr(module, "train_fn", train_fn)
        torch.manual_seed(0)
        config = CONFIG | {"num-server-rounds": 6}
        server(InProcessGrid(client, 5, config), Context(1, 0, {}, RecordDict(), config))
    capsys.readouterr()
    return moved


def test_its_own_train_does_not_thaw_fixbn(written: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart's ``train`` calls ``net.train()``."""
    assert moved_in_frozen_rounds(written("fixbn"), capsys, monkeypatch) == [False] * 15  # five clients, rounds 4 to 6

    def by_mode(model: Any, frozen: bool = True, layers: Any = None) -> None:
        for layer in batch_norms(model).values() if frozen and layers is None else ():
            layer.train(False)

    monkeypatch.setattr(client_round, "freeze_statistics", by_mode)  # control: frozen by evaluation mode alone
    monkeypatch.setattr(client_round, "train_mode", lambda model: by_mode(model.train()))
    assert True in moved_in_frozen_rounds(written("fixbn"), capsys, monkeypatch)
