"""Apps in the shape of Flower's own, before and after: what they had still works, few lines change, and the method is really at work."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.flower_apps import APPS, CLIENTS, EVALUATION, METHOD, NAMES, Ran, environment, imported, run, with_method
from tests.examples.test_trackers import read
from tests.listed import listed

Runs = Callable[..., Ran]
CONFIG = {"advanced-pytorch": {"use-wandb": False}}
MESSAGES = ("quickstart-pytorch", "advanced-pytorch", "quickstart-monai")  # apps of Flower's present API
NEEDS = {"quickstart-monai": "monai"}  # packages that apps import and the README's test command does not install; .ci/run does
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "start" / "flower-app.md"
SHOWN = {  # the run config of an app in a real run of Flower's, and what its log then has
    "advanced-pytorch": ("num-server-rounds=2 use-wandb=false", ("method fbn: found 2 BatchNorm2d", "New best global model found")),
    "niid_bench": ("num-server-rounds=2", ("method hbn: found 2 BatchNorm2d", "[round 2/2] 5/5 clients", "History (loss, centralized):")),
}
WANDB_ROWS = """
import json, sys
from wandb.proto import wandb_internal_pb2 as pb
from wandb.sdk.internal.datastore import DataStore
store, rows = DataStore(), []
store.open_for_scan(sys.argv[1])
while (data := store.scan_data()) is not None:
    record = pb.Record()
    record.ParseFromString(data)
    if record.WhichOneof("record_type") == "history":
        rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
print(rows)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Each app runs once in each way."""
    found: dict[tuple[Any, ...], Ran] = {}

    def one(name: str, when: str, method: str = "", rounds: int = 2, double: bool = False) -> Ran:
        if name in NEEDS:
            pytest.importorskip(NEEDS[name], reason=f"pip install -c constraints.txt {NEEDS[name]}")
        key = (name, when, method, rounds, double)
        if key not in found:
            folder = tmp_path_factory.mktemp("app")
            app = with_method(name, method, folder / "app") if method else APPS / name / when
            dtype = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64 if double else dtype)
            try:
                found[key] = run(name, app, folder / "out", rounds, **CONFIG.get(name, {}))
            finally:
                torch.set_default_dtype(dtype)
        return found[key]

    return one


def floats(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All but BatchNorm's counters, which Flower averages to floats."""
    return {name: tensor for name, tensor in model.items() if tensor.is_floating_point() and not name.endswith("num_batches_tracked")}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# Lines

OWN_START = "advanced-pytorch"  # its loop over Flower's hooks becomes hooks that ``start`` calls


def changed(name: str) -> list[str]:
    """The lines that the conversion takes away (``-``) or adds (``+``), without empty ones."""
    words = ["git", "diff", "--no-index", "-w", "--unified=0", "--no-color", "before", "after"]
    found = subprocess.run(words, cwd=APPS / name, capture_output=True, text=True, check=False).stdout.splitlines()
    return [line for line in found if line[:1] in ("+", "-") and line[:3] not in ("+++", "---") and line[1:].strip()]


@listed("name", NAMES)
def test_few_lines_change_and_the_page_has_them(name: str) -> None:
    lines, page = changed(name), PAGE.read_text()
    added, removed = (sum(line[0] == sign for line in lines) for sign in "+-")
    assert 0 < added <= (32 if name == OWN_START else 10)
    assert removed <= (36 if name == OWN_START else 12)
    assert re.search(rf"(?m)^\| \[`{name}`\].* \[`{METHOD[name]}`\].* \| {added} \| {removed} \|$", page)


# Before and after


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_before_it_is_plain_flower(name: str, ran: Runs) -> None:
    assert not any("fl_bn" in file.read_text() for file in (APPS / name / "before").rglob("*.py"))
    assert len(ran(name, "before").sent("train")) == 2


@pytest.mark.sample("pytorch]", "[fedbn")
@pytest.mark.parametrize("name", NAMES)
def test_after_it_trains_by_the_method(name: str, ran: Runs) -> None:
    after = ran(name, "after")
    assert any(f"method {METHOD[name]}: found" in line for line in after.log)
    shown = f"[round 2/2] {CLIENTS[name]}/{CLIENTS[name]} clients"
    assert any(shown in line for line in after.log)
    assert len(after.sent("train")) == 2


@pytest.mark.parametrize("name", EVALUATION)
def test_the_evaluation_at_the_server_is_called_from_round_0_on(name: str, ran: Runs) -> None:
    before, after = ran(name, "before"), ran(name, "after")
    assert before.evaluated == after.evaluated == [0, 1, 2]
    assert {*before.result.evaluate_metrics_serverapp[2]} == {*after.result.evaluate_metrics_serverapp[2]} == {"accuracy", "loss"}
    assert dict(before.result.evaluate_metrics_serverapp[0]) == pytest.approx(dict(after.result.evaluate_metrics_serverapp[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MESSAGES)
def test_own_metrics_are_combined_as_before(name: str, ran: Runs) -> None:
    before, after = ran(name, "before").result, ran(name, "after").result
    for round in (1, 2):
        assert {*before.train_metrics_clientapp[round]} == {"train_loss"} <= {*after.train_metrics_clientapp[round]}
        assert {*before.evaluate_metrics_clientapp[round]} == {"eval_loss", "eval_acc"} == {*after.evaluate_metrics_clientapp[round]}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_model_is_written_and_loads_into_the_app_s_network(name: str, ran: Runs) -> None:
    before, after = ran(name, "before").model(), ran(name, "after").model()
    assert {k: t.shape for k, t in before.items()} == {k: t.shape for k, t in after.items()}
    assert {k: t.dtype for k, t in floats(before).items()} == {k: t.dtype for k, t in floats(after).items()}
    counters = {t.dtype for k, t in after.items() if k.endswith("num_batches_tracked")}
    assert counters == {torch.int64}  # plain Flower makes floats of them


def test_half_of_the_clients_evaluate_as_before(ran: Runs) -> None:
    for when in ("before", "after"):
        grid = ran("quickstart-pytorch", when).grid
        assert len([m for m in grid.sent if m.metadata.message_type == "evaluate"]) == 2 * 2  # of 3 clients, at least 2


# The strategy of advanced-pytorch, with a start of its own


def outputs(ran: Ran) -> tuple[Path, list[dict[str, Any]]]:
    (file,) = ran.folder.glob("outputs/*/*/results.json")
    return file.parent, json.loads(file.read_text())


def test_its_schedule_holds_and_its_results_are_written_each_round(ran: Runs) -> None:
    before, after = ran("advanced-pytorch", "before", rounds=4), ran("advanced-pytorch", "after", rounds=4)
    assert [c["lr"] for c in before.sent("train")] == [c["lr"] for c in after.sent("train")] == [0.05, 0.05, 0.025, 0.025]
    for one in (before, after):
        results = outputs(one)[1]
        assert [result["round"] for result in results] == [1, 2, 3, 4]
        assert all({*result["evaluate_metrics_clientapp"]} == {"eval_loss", "eval_acc"} for result in results)
        assert all({*result["evaluate_metrics_serverapp"]} == {"accuracy", "loss"} for result in results)
        assert all("train_loss" in result["train_metrics"] for result in results)


def test_its_best_model_is_kept(ran: Runs) -> None:
    folder, results = outputs(after := ran("advanced-pytorch", "after", rounds=4))
    best = max(results, key=lambda result: result["evaluate_metrics_serverapp"]["accuracy"])
    accuracy = best["evaluate_metrics_serverapp"]["accuracy"]
    assert accuracy > after.result.evaluate_metrics_serverapp[0]["accuracy"]
    state = torch.load(folder / f"model_state_acc_{accuracy}_round_{best['round']}.pth")
    with imported(APPS / "advanced-pytorch" / "after") as (server, _):
        net = server.Net()
        net.load_state_dict(state)
        assert server.test(net, server.load_test(), "cpu")[1] == accuracy


def test_each_client_keeps_its_own_head(ran: Runs) -> None:
    for when in ("before", "after"):
        heads = [state["classification-head"].to_torch_state_dict() for state in ran("advanced-pytorch", when).states()]
        assert not torch.equal(heads[0]["weight"], heads[1]["weight"])


@pytest.mark.nightly
@pytest.mark.slow
def test_its_tracker_gets_every_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases itself, offline, in a process of its own: it warns when it is imported, and here warnings are errors."""
    wandb = pytest.importorskip("wandb", reason="pip install -c constraints.txt wandb")
    assert wandb
    code = (
        "import sys; from pathlib import Path; from tests.examples.flower_apps import run\n"
        "run('advanced-pytorch', Path(sys.argv[1]), Path(sys.argv[2]), 3)"
    )
    tracked = {}
    for when in ("before", "after"):
        folder = tmp_path / when
        command = [sys.executable, "-W", "ignore", "-c", code, str(APPS / "advanced-pytorch" / when), str(folder)]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (file,) = folder.glob("wandb/offline-run-*/*.wandb")
        tracked[when] = [{name for name in row if not name.startswith("_")} for row in read(WANDB_ROWS, str(file))]
    assert [len(rows) for rows in tracked.values()] == [3, 3]
    for before, after in zip(*tracked.values(), strict=True):
        assert before == {"train_loss", "eval_loss", "eval_acc", "accuracy", "loss"} <= after


# The legacy apps


def test_fedbn_has_its_results_for_each_data_set(ran: Runs) -> None:
    found = {}
    for when in ("before", "after"):
        (file,) = ran("fedbn", when).folder.glob("results/FedBN/history.json")
        found[when] = json.loads(file.read_text())
        assert json.loads((file.parent / "config.json").read_text())["num-clients"] == 5
    for kind in ("losses_distributed", "metrics_distributed_fit", "metrics_distributed"):
        assert shape(found["before"][kind]) == shape(found["after"][kind])
    accuracies = dict(found["after"]["metrics_distributed_fit"]["accuracy"])
    assert {*accuracies} == {1, 2}
    assert {*accuracies[1]} == {"MNIST", "SVHN", "USPS", "SynthDigits", "MNIST-M"}


def shape(found: Any) -> Any:
    """The form of a result: names and rounds, without the numbers."""
    if isinstance(found, dict):
        return {name: shape(value) for name, value in found.items()}
    return [shape(value) for value in found] if isinstance(found, list) else found if isinstance(found, int) else type(found)


@pytest.mark.slow
def test_fedbn_s_own_code_and_the_method_agree(ran: Runs) -> None:
    """The baseline keeps its BatchNorm by names in its client. fl-bn's FedBN does the same by types."""
    before, after = ran("fedbn", "before", double=True), ran("fedbn", "after", double=True)
    own = [state["local_batch_norm"].to_torch_state_dict() for state in before.states()]
    kept = [state["fl-bn/local"].to_torch_state_dict() for state in after.states()]
    for one, other in zip(own, kept, strict=True):
        names = {*floats(one)} & {*other}
        assert len(names) == 3 * 4
        assert largest_difference({k: one[k] for k in names}, {k: other[k] for k in names}) < 1e-9
    assert largest_difference(floats(own[0]), floats(own[1])) > 0.1  # control: each client has its own


@pytest.mark.slow
def test_niid_bench_has_its_schedule_and_its_best_model(ran: Runs) -> None:
    before, after = ran("niid_bench", "before", rounds=3), ran("niid_bench", "after", rounds=3)
    assert [config["lr"] for config in before.sent("train")] == [config["lr"] for config in after.sent("train")] == [0.1, 0.1, 0.05]
    best = torch.load(after.folder / "best_model.pt")
    assert best["round"] in (1, 2, 3)
    assert best["accuracy"] > 0.1
    assert {*best["model"]} == {*torch.load(before.folder / "best_model.pt")["model"]}


# The method


def final(name: str, ran: Ran) -> dict[str, torch.Tensor]:
    """The last model, as far as the app has it in a file."""
    return floats(ran.model() if name in MESSAGES else torch.load(ran.folder / "best_model.pt")["model"])


@pytest.mark.sample("[advanced")
@pytest.mark.parametrize(("name", "double"), [("quickstart-pytorch", True), ("advanced-pytorch", True), ("quickstart-monai", False)])
def test_with_fedavg_it_is_the_app_before(name: str, double: bool, ran: Runs) -> None:
    rounds = 2 if double else 1  # MONAI's transforms give float32, whose rounding the second round's training magnifies
    before, after = ran(name, "before", rounds=rounds, double=double), ran(name, "after", "fedavg", rounds=rounds, double=double)
    assert largest_difference(final(name, before), final(name, after)) < (1e-9 if double else 1e-6)
    own = ran(name, "after", rounds=2, double=double)
    assert largest_difference(final(name, ran(name, "before", rounds=2, double=double)), final(name, own)) > 1e-3  # control: the method


@pytest.mark.slow
def test_niid_bench_with_fedavg_is_the_app_before(ran: Runs) -> None:
    found = [ran("niid_bench", when, method, double=True) for when, method in (("before", ""), ("after", "fedavg"), ("after", ""))]
    models = [floats(torch.load(one.folder / "best_model.pt")["model"]) for one in found]
    assert largest_difference(models[0], models[1]) < 1e-9
    assert largest_difference(models[0], models[2]) > 1e-3  # control: the method


# On Ray


@pytest.mark.ray
@pytest.mark.pinned("tests/newest has the newest")
@pytest.mark.parametrize("name", [*SHOWN])
def test_it_runs_as_its_user_starts_it(name: str, tmp_path: Path) -> None:
    app = tmp_path / "app"
    shutil.copytree(APPS / name / "after", app, ignore=shutil.ignore_patterns("__pycache__"))
    env = os.environ | {"PYTHONPATH": str(ROOT), "FLWR_HOME": str(tmp_path / "flwr"), "RAY_ADDRESS": "local"}  # no cluster of others
    scripts = Path(sys.executable).parent  # of an environment that need not be activated
    env["PATH"] = f"{scripts}{os.pathsep}{env['PATH']}"
    command = (str(scripts / "flwr"), "run", ".", "--run-config", SHOWN[name][0])
    done = subprocess.run(command, cwd=app, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert [line for line in SHOWN[name][1] if line not in done.stdout + done.stderr] == [], done.stdout + done.stderr
