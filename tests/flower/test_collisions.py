"""What an app has that Flower offers, beside fl-bn: it works, or is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.client import mod as older
from flwr.clientapp import ClientApp
from flwr.clientapp import mod as newer
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import Strategy

from fl_bn.flower import (
    FBN,
    BatchNormStrategy,
    FedBN,
    Rounds,
    RunFailed,
    run_in_process,
)
from fl_bn.methods import METHODS
from tests.documentation.pages import ROOT
from tests.flower.own_apps import CLIENTS, config, equal, lr, net, overriding, own_app, ran, refused
from tests.listed import listed


def test_the_start_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec((ROOT / "docs/how-to/collisions.md").read_text().split("```python\n")[1].split("```")[0], names)
    mine, plain = (ran(kind(net()), own_app("fedbn"), rounds=2, train_config=config(lr=0.1)) for kind in (names["Mine"], FedBN))
    assert equal(mine, plain)
    assert capsys.readouterr().out.count("my_acc") == 2


# Flower's strategies with noise

NOISE = {
    f"DifferentialPrivacy{side}Side{kind}Clipping": {"noise_multiplier": 0.1, "num_sampled_clients": CLIENTS, **options}
    for side in ("Server", "Client")
    for kind, options in (("Fixed", {"clipping_norm": 1.0}), ("Adaptive", {}))
}


def noisy(name: str, inner: Strategy) -> Strategy:
    return getattr(strategies, name)(inner, **NOISE[name])


def nested(inner: Strategy) -> Strategy:
    return noisy("DifferentialPrivacyServerSideFixedClipping", noisy("DifferentialPrivacyClientSideFixedClipping", inner))


INNER = {
    "FedBN": lambda: FedBN(net()),
    "FBN": lambda: FBN(net()),
    "Mine": lambda: overriding(FedBN, "configure_train")(net()),
    "BatchNormStrategy": lambda: BatchNormStrategy(net(), METHODS["fedbn"](), Rounds(CLIENTS, wait=0.0)),
}


@listed(
    ("wrap", "inner"),
    [
        *((functools.partial(noisy, name), "FBN") for name in NOISE),
        *((functools.partial(noisy, "DifferentialPrivacyClientSideFixedClipping"), name) for name in INNER),
        (nested, "FedBN"),
    ],
)
def test_flower_s_wrappers_with_noise_are_refused(wrap: Callable[[Strategy], Strategy], inner: str) -> None:
    app = own_app("fbn" if inner == "FBN" else "fedbn")
    start = ArrayRecord(net().state_dict())
    refused(lambda: ran(wrap(INNER[inner]()), app, initial_arrays=start), RunFailed, inner, "strategy.start(", "dp-noise")


# mods

PLACES: dict[str, Callable[[list[Any]], tuple[list[Any], list[Any], list[Any]]]] = {
    "the app": lambda mods: (mods, [], []),
    "train": lambda mods: ([], mods, []),
}
MODS: dict[str, list[Any]] = {
    "fixedclipping_mod": [older.fixedclipping_mod, newer.fixedclipping_mod],
    "LocalDpMod": [older.LocalDpMod(1.0, 1.0, 1.0, 1e-5), newer.LocalDpMod(1.0, 1.0, 1.0, 1e-5)],
}


def started(*mods: Any, place: str = "the app", rounds: int = 1) -> Any:
    return ran(FedBN(net()), own_app("fedbn", mods=PLACES[place](list(mods))), rounds)


@listed(("name", "place"), [("fixedclipping_mod", "the app"), ("fixedclipping_mod", "train"), ("LocalDpMod", "the app")])
def test_mods_that_cannot_work_end_the_run_with_their_own_error(name: str, place: str) -> None:
    for mod, word in zip(MODS[name], ("fitins.parameters", name), strict=True):
        refused(lambda mod=mod: started(mod, place=place), RunFailed, word)


def test_a_client_with_such_a_mod_is_left_out_by_name_and_the_others_go_on(log: pytest.LogCaptureFixture) -> None:
    right, wrong = own_app("fedbn"), own_app("fedbn", mods=([newer.fixedclipping_mod], [], []))

    class Mixed(ClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            return (wrong if context.node_config["partition-id"] == 2 else right)(message, context)

    result = ran(FedBN(net()), Mixed())
    assert [client.client for client in result.records[0].clients] == [0, 1]
    assert "fixedclipping_mod" in log.text


# ways to start


def test_a_main_with_a_config_and_a_folder_of_its_own_keeps_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hydra calls it: with a nested config, in the folder of its outputs."""
    server_app, client_app = ServerApp(), own_app("fedbn", rate=lr)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        optimizer: Any = context.run_config["optimizer"]
        result = FedBN(net()).start(grid, num_rounds=1, train_config=config(lr=optimizer["lr"]))
        torch.save(result.arrays.to_torch_state_dict(), "model.pt")

    monkeypatch.chdir(tmp_path)
    run_in_process({"clients": CLIENTS, "optimizer": {"name": "sgd", "lr": 0.05}}, server_app=server_app, client_app=client_app)
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]
    assert "0.weight" in torch.load("model.pt", weights_only=True)
