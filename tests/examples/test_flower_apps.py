"""Apps in the shape of Flower's own, before and after: what they had still works, few lines change, and the method is really at work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.flower_apps import APPS, CLIENTS, METHOD, NAMES, Ran, lines_changed, run, with_method
from tests.integration.runs import ROOT, environment
from tests.listed import listed

Runs = Callable[..., Ran]
CONFIG = {"advanced-pytorch": {"use-wandb": False}}
MESSAGES = ("quickstart-pytorch", "advanced-pytorch", "quickstart-monai")  # apps of Flower's present API
NEEDS = {"quickstart-monai": "monai"}  # packages that apps import and the README's test command does not install; .ci/run does
PAGE = ROOT / "docs" / "start" / "flower-app.md"
ROUNDS = 3
SHOWN = {  # the run config of an app in a real run of Flower's, and what its log then has
    "advanced-pytorch": ("num-server-rounds=2 use-wandb=false", ("method fbn: found 2 BatchNorm2d", "New best global model found")),
    "niid_bench": ("num-server-rounds=2", ("method hbn: found 2 BatchNorm2d", "[round 2/2] 5/5 clients", "History (loss, centralized):")),
}


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


@listed("name", NAMES)
def test_the_page_says_how_few_lines_change(name: str) -> None:
    added, removed = lines_changed(APPS / name)
    assert re.search(rf"(?m)^\| \[`{name}`\].* \[`{METHOD[name]}`\].* \| {added} \| {removed} \|$", PAGE.read_text())


# Before and after


@pytest.mark.sample("pytorch]", "[fedbn")
@pytest.mark.parametrize("name", NAMES)
def test_after_it_trains_by_the_method_and_what_it_had_still_works(name: str, ran: Runs) -> None:
    before, after = ran(name, "before", rounds=ROUNDS), ran(name, "after", rounds=ROUNDS)
    assert not any("fl_bn" in file.read_text() for file in (APPS / name / "before").rglob("*.py"))
    assert any(f"method {METHOD[name]}: found" in line for line in after.log)
    assert any(f"[round {ROUNDS}/{ROUNDS}] {CLIENTS[name]}/{CLIENTS[name]} clients" in line for line in after.log)
    assert had(before) <= had(after)  # metrics of the method may stand beside the app's own


def had(ran: Ran) -> set[str]:
    """Return the form of what an app had: evaluations, metrics, its files, and the results in them, without the numbers."""
    files = {file.name: json.loads(file.read_text()) for file in ran.folder.rglob("*.json")}
    files |= {file.name: torch.load(file) for file in ran.folder.rglob("*.pt")}
    kinds = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
    metrics = {kind: {str(n): dict(of) for n, of in (getattr(ran.result, kind, None) or {}).items()} for kind in kinds}
    at_clients = [m for m in ran.grid.sent if m.metadata.message_type == "evaluate"]
    return {f"{len(at_clients)} at clients", *form({**files, **metrics})}


def form(found: Any, at: str = "") -> set[str]:
    if not isinstance(found, dict | list):
        return {f"{at}: {tuple(found.shape) if isinstance(found, torch.Tensor) else type(found)}"}
    parts = found if isinstance(found, dict) else {f"{i} of {len(found)}": one for i, one in enumerate(found)}
    return {inner for name, one in parts.items() for inner in form(one, f"{at}/{name}")}


@pytest.mark.slow
def test_fedbn_s_own_code_and_the_method_agree(ran: Runs) -> None:
    """The baseline keeps its BatchNorm by names in its client. fl-bn's FedBN does the same by types."""
    before, after = ran("fedbn", "before", double=True), ran("fedbn", "after", double=True)
    own = [state["local_batch_norm"].to_torch_state_dict() for state in before.grid.states()]
    kept = [state["fl-bn/local"].to_torch_state_dict() for state in after.grid.states()]
    for one, other in zip(own, kept, strict=True):
        names = {*floats(one)} & {*other}
        assert len(names) == 3 * 4
        assert largest_difference({k: one[k] for k in names}, {k: other[k] for k in names}) < 1e-9
    assert largest_difference(floats(own[0]), floats(own[1])) > 0.1  # control: each client has its own


# The method


def final(name: str, ran: Ran) -> dict[str, torch.Tensor]:
    """Return the last model, or the best one of an app that keeps only that."""
    return floats(torch.load(ran.folder / "final_model.pt") if name in MESSAGES else torch.load(ran.folder / "best_model.pt")["model"])


@pytest.mark.sample("[advanced")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "fedbn"])
def test_with_fedavg_it_is_the_app_before(name: str, ran: Runs) -> None:
    double = name not in NEEDS  # MONAI's transforms give float32, whose rounding the second round's training magnifies
    before, after, own = (
        final(name, ran(name, when, method, rounds=ROUNDS if double else 1, double=double))  # in the third, rates change
        for when, method in (("before", ""), ("after", "fedavg"), ("after", ""))
    )
    assert largest_difference(before, after) < (1e-9 if double else 1e-6)
    assert largest_difference(before, own) > 1e-3  # control: the method


# On Ray


@pytest.mark.ray
@pytest.mark.pinned("tests/newest has the newest")
@pytest.mark.parametrize("name", [*SHOWN])
def test_it_runs_as_its_user_starts_it(name: str, tmp_path: Path) -> None:
    app = tmp_path / "app"
    shutil.copytree(APPS / name / "after", app, ignore=shutil.ignore_patterns("__pycache__"))
    command = ("flwr", "run", ".", "--run-config", SHOWN[name][0])
    variables = environment(tmp_path / "flwr")
    done = subprocess.run(command, cwd=app, env=variables, capture_output=True, text=True, timeout=280, check=False)
    assert [line for line in SHOWN[name][1] if line not in done.stdout + done.stderr] == [], done.stdout + done.stderr
