"""What an app has that Flower offers, beside fl-bn: it works, or is refused by name. Each row of the page about that has its test."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.client import mod as older
from flwr.clientapp import ClientApp
from flwr.clientapp import mod as newer
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_bn.flower import (
    FBN,
    FedAvgBN,
    FedBN,
    FedBNStrategy,
    FixBN,
    Gate,
    InProcessGrid,
    OwnAppStrategy,
    Rounds,
    RunFailed,
    answer,
    evaluating,
    run_in_process,
    training,
)
from fl_bn.flower.grid_transport import numbers_of
from fl_bn.methods import METHODS
from tests.documentation.pages import ROOT
from tests.flower.own_apps import CLIENTS, SAMPLES, client_of, config, data, net, own_app
from tests.listed import listed

PAGE = ROOT / "docs/how-to/collisions.md"
HERE = "tests/flower/test_collisions.py"
STRATEGIES, START = "tests/flower/test_own_strategies.py", "tests/flower/test_own_start.py"
KEYS, METRICS, EVALUATE = "tests/flower/test_own_keys.py", "tests/flower/test_own_metrics.py", "tests/flower/test_evaluate_fn.py"

ROWS: dict[str, list[str]] = {
    "a subclass that overrides hooks": [f"{STRATEGIES}::test_a_subclass_of_each_strategy_for_own_apps_has_each_hook_called"],
    "attributes of your subclass (`self.model`, `self.rounds`, ...)": [
        f"{STRATEGIES}::test_attributes_of_a_subclass_replace_nothing_of_fl_bn",
        f"{STRATEGIES}::test_flowers_arguments_that_a_subclass_sets_later_count",
    ],
    "names in your subclass that begin with `_`, and fl-bn uses them too": [
        f"{STRATEGIES}::test_a_private_name_of_fl_bn_is_refused_in_a_subclass",
    ],
    "a subclass of `BatchNormStrategy` or `FixBNStrategy` with an attribute or method of theirs (`self.cohort`)": [
        f"{STRATEGIES}::test_a_subclass_of_a_strategy_for_runs_that_uses_its_names_is_refused",
    ],
    "a `start` that calls `super().start(...)`": [f"{STRATEGIES}::test_a_subclass_of_each_strategy_for_own_apps_has_each_hook_called"],
    "a `start` with a loop of its own": [
        f"{START}::test_flower_s_own_start_over_the_hooks_has_the_bits_of_start",
        f"{START}::test_a_start_of_one_s_own_with_schedule_checkpoint_tracker_and_early_stop",
        "tests/flower/test_order_of_hooks.py::test_calls_that_make_no_sense_are_refused",
    ],
    "a strategy of your own around another": [f"{START}::test_a_wrapper_of_one_s_own_hands_the_hooks_on"],
    "arguments of `FedAvg`": [
        f"{KEYS}::test_an_argument_that_cannot_work_is_refused_by_name",
        f"{KEYS}::test_any_share_of_the_clients_evaluates",
    ],
    "`FedAdam`, `FedProx`, `Krum` and the like": [f"{START}::test_an_optimiser_of_the_server_keeps_its_memory"],
    "`DifferentialPrivacy...Clipping` around a strategy": [f"{HERE}::test_flower_s_wrappers_with_noise_are_refused_by_name"],
    "`initial_arrays` with pre-trained weights": [f"{KEYS}::test_pretrained_arrays_are_where_a_client_s_own_layers_begin"],
    "`evaluate_fn`": [f"{EVALUATE}::test_the_arrays_load_into_the_user_s_network"],
    "a checkpoint by `torch.save`": [
        f"{HERE}::test_a_checkpoint_of_one_s_own_loads",
        f"{EVALUATE}::test_the_result_s_arrays_load_into_the_network_too",
    ],
    "callbacks of fl-bn in a loop of your own": [f"{START}::test_what_the_hooks_alone_cannot_do_is_refused_in_one_sentence"],
    "wandb, MLflow, TensorBoard": [
        f"{HERE}::test_wandb_has_the_metrics_of_a_loop_of_one_s_own",
        f"{HERE}::test_a_tracker_in_a_hook_has_all_metrics",
    ],
    "keys in `train_config`, such as `lr`, `run` or `version`": [f"{KEYS}::test_the_user_s_config_comes_through_untouched"],
    "a learning rate that changes per round": [
        f"{STRATEGIES}::test_a_rate_that_a_hook_halves_is_halved_at_the_clients_and_in_the_records",
        f"{START}::test_a_rate_that_the_loop_changes_per_round_is_the_round_s",
    ],
    "records in `context.state`": [f"{KEYS}::test_records_of_one_s_own_in_the_state_of_a_client_stay"],
    "training metrics of your own": [f"{METRICS}::test_training_metrics_reach_the_result_weighted_and_per_client"],
    "evaluation metrics of your own": [f"{METRICS}::test_an_evaluation_under_another_name_is_counted_and_shown"],
    "`train_metrics_aggr_fn`, `evaluate_metrics_aggr_fn`": [f"{METRICS}::test_functions_of_one_s_own_combine_them"],
    "`fixedclipping_mod`, `adaptiveclipping_mod`": [f"{HERE}::test_mods_that_cannot_work_are_refused_before_round_1"],
    "`LocalDpMod`": [f"{HERE}::test_mods_that_cannot_work_are_refused_before_round_1"],
    "`secaggplus_mod`, `secagg_mod`": [f"{HERE}::test_mods_that_cannot_work_are_refused_before_round_1"],
    "`message_size_mod`": [f"{HERE}::test_mods_that_only_look_work"],
    "`arrays_size_mod` (once `parameters_size_mod`)": [f"{HERE}::test_mods_that_only_look_work"],
    "a mod of your own": [f"{HERE}::test_a_mod_of_one_s_own_works"],
    "opacus in your loop": [f"{HERE}::test_opacus_in_an_app_of_one_s_own"],
    "a site that asks for `secure-aggregation`": [
        "tests/doors/test_flower.py::test_a_client_that_must_be_aggregated_securely_answers_nothing_in_the_clear"
    ],
    "a Hydra app": [f"{HERE}::test_a_main_with_a_config_and_a_folder_of_its_own_keeps_both"],
    "`start_simulation`, `start_server`, `ServerAppComponents`": [f"{HERE}::test_the_older_api_is_refused_in_one_sentence"],
    "a `server_fn` with Flower's older `FedAvg`": [
        "tests/flower/test_legacy_apps.py::test_a_server_of_one_s_own_gets_the_history",
        "tests/flower/test_legacy_apps.py::test_a_server_that_cannot_run_is_refused_by_name",
    ],
    "a `NumPyClient`": [
        f"{HERE}::test_a_client_fn_is_refused_in_one_sentence",
        "tests/examples/test_examples.py::test_a_legacy_numpy_client_under_fixbn",
    ],
}


def rows() -> list[list[str]]:
    """The cells of the page's tables with three columns, without their heads."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [row for row in cells if len(row) == 3 and row[0] != "you have"]


@functools.cache
def functions_of(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}


def test_each_row_of_the_page_has_its_tests() -> None:
    assert [row[0] for row in rows()] == [*ROWS]
    named = [test.split("::") for tests in ROWS.values() for test in tests]
    assert [f"{file}::{test}" for file, test in named if test not in functions_of(file)] == []


def test_the_loop_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(PAGE.read_text().split("```python\n")[1].split("```")[0], names)
    arrays, grid = ArrayRecord(net().state_dict()), InProcessGrid(own_app("fedbn"), CLIENTS, {})
    last = names["Mine"](net()).start(grid, arrays, 2, config(lr=0.1))
    plain = FedBN(net()).start(InProcessGrid(own_app("fedbn"), CLIENTS, {}), arrays, num_rounds=2, train_config=config(lr=0.1)).arrays
    assert all((last[name].numpy() == plain[name].numpy()).all() for name in plain)
    assert capsys.readouterr().out.count("my_acc") == 2


# Flower's strategies with noise


class Subclass(DifferentialPrivacyServerSideFixedClipping):
    """A user's own, which overrides a hook."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        return list(super().configure_train(server_round, arrays, config, grid))


def fixed(kind: Any, inner: Strategy) -> Strategy:
    made: Strategy = kind(inner, noise_multiplier=1.0, clipping_norm=1.0, num_sampled_clients=CLIENTS)
    return made


def adaptive(kind: Any, inner: Strategy) -> Strategy:
    made: Strategy = kind(inner, noise_multiplier=0.1, num_sampled_clients=CLIENTS)
    return made


WRAPPED: dict[str, Callable[[Strategy], Strategy]] = {
    "DifferentialPrivacyServerSideFixedClipping": lambda inner: fixed(DifferentialPrivacyServerSideFixedClipping, inner),
    "DifferentialPrivacyClientSideFixedClipping": lambda inner: fixed(DifferentialPrivacyClientSideFixedClipping, inner),
    "DifferentialPrivacyServerSideAdaptiveClipping": lambda inner: adaptive(DifferentialPrivacyServerSideAdaptiveClipping, inner),
    "DifferentialPrivacyClientSideAdaptiveClipping": lambda inner: adaptive(DifferentialPrivacyClientSideAdaptiveClipping, inner),
}
NESTED: dict[str, Callable[[Strategy], Strategy]] = {
    "a wrapper in a wrapper": lambda inner: WRAPPED["DifferentialPrivacyServerSideFixedClipping"](
        WRAPPED["DifferentialPrivacyClientSideFixedClipping"](inner)
    ),
    "a subclass": lambda inner: fixed(Subclass, inner),
}


@listed("case", [*WRAPPED, *NESTED])
def test_flower_s_wrappers_with_noise_are_refused_by_name(case: str) -> None:
    name = case if case in WRAPPED else "DifferentialPrivacy(Client|Server)SideFixedClipping"
    wrap, arrays = {**WRAPPED, **NESTED}[case], ArrayRecord(net().state_dict())
    for inner, negative in ((FedBN(net()), ""), (FBN(net()), ", and its noise would make BatchNorm's variances negative")):
        says = rf"^{name} cannot wrap {type(inner).__name__}: .* several records with shared tensors{negative}; for noise take fl-bn's"
        with pytest.raises(RunFailed, match=says):
            wrap(inner).start(InProcessGrid(own_app(inner.of), CLIENTS, {}), arrays, num_rounds=1)


def test_they_are_refused_around_a_strategy_that_overrides_and_around_the_application_s() -> None:
    class Mine(FedBN):
        def configure_train(self, *args: Any) -> Any:
            return super().configure_train(*args)

    wrap, arrays = WRAPPED["DifferentialPrivacyClientSideFixedClipping"], ArrayRecord(net().state_dict())
    for inner in (Mine(net()), FedBNStrategy(net(), Rounds(CLIENTS, wait=0.0))):
        with pytest.raises(RunFailed, match=f"DifferentialPrivacyClientSideFixedClipping cannot wrap {type(inner).__name__}"):
            wrap(inner).start(InProcessGrid(own_app("fedbn"), CLIENTS, {}), arrays, num_rounds=1)


# mods


def with_mods(everywhere: list[Any], on_train: list[Any], on_evaluate: list[Any]) -> ClientApp:
    method = METHODS["fedbn"]()
    app = ClientApp(mods=everywhere)
    answer(app, net, method, lambda context: data(client_of(context)))

    @app.train(mods=on_train)
    def train(message: Message, context: Context) -> Message:
        with training(message, context, net(), method) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
            for x, y in data(client_of(context)):
                optimizer.zero_grad()
                loss = F.cross_entropy(round.model(x), y)
                loss.backward()
                optimizer.step()
        return round.message(SAMPLES, loss.item())

    @app.evaluate(mods=on_evaluate)
    def evaluate(message: Message, context: Context) -> Message:
        evaluating(message, context, net(), method)
        reply = Message(message.content, reply_to=message)
        reply.content.clear()
        reply.content["metrics"] = MetricRecord({"eval_acc": 0.5, "num-examples": 8})
        return reply

    return app


PLACES: dict[str, Callable[[list[Any]], ClientApp]] = {
    "the app": lambda mods: with_mods(mods, [], []),
    "train": lambda mods: with_mods([], mods, []),
    "evaluate": lambda mods: with_mods([], [], mods),
    "both": lambda mods: with_mods([older.message_size_mod], mods, []),
}
MODS: dict[str, list[Any]] = {
    "fixedclipping_mod": [older.fixedclipping_mod, newer.fixedclipping_mod, functools.partial(newer.fixedclipping_mod)],
    "adaptiveclipping_mod": [older.adaptiveclipping_mod, newer.adaptiveclipping_mod],
    "LocalDpMod": [older.LocalDpMod(1.0, 1.0, 1.0, 1e-5), newer.LocalDpMod(1.0, 1.0, 1.0, 1e-5)],
    "secaggplus_mod": [older.secaggplus_mod],
    "secagg_mod": [older.secagg_mod],
}


def started(app: ClientApp, rounds: int = 1) -> Any:
    return FedBN(net()).start(InProcessGrid(app, CLIENTS, {}), num_rounds=rounds)


@listed(("name", "place"), [(name, place) for name in MODS for place in PLACES])
def test_mods_that_cannot_work_are_refused_before_round_1(name: str, place: str) -> None:
    way_out = "for secure sums take fl-bn's own application" if name.startswith("secagg") else "for noise take fl-bn's own application"
    for mod in MODS[name]:
        for mods in ([mod], [older.message_size_mod, mod], [mod, older.arrays_size_mod]):
            with pytest.raises(RunFailed, match=f"^{name} cannot be a mod of this app: it .*; {way_out}"):
                started(PLACES[place](mods))


def test_one_inside_a_mod_of_one_s_own_is_named_too() -> None:
    def mine(message: Message, context: Context, handle: Any) -> Message:
        reply: Message = newer.fixedclipping_mod(message, context, handle)
        return reply

    with pytest.raises(RunFailed, match="^fixedclipping_mod cannot be a mod of this app"):
        started(with_mods([mine], [], []))
    with pytest.raises(RunFailed, match="fixedclipping_mod expects exactly one ArrayRecord"):  # seen in round 1
        started(with_mods([], [mine], []))


def test_a_client_with_such_a_mod_is_left_out_by_name_and_the_others_go_on(log: pytest.LogCaptureFixture) -> None:
    right, wrong = with_mods([], [], []), with_mods([newer.fixedclipping_mod], [], [])

    class Mixed(ClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            return (wrong if client_of(context) == 2 else right)(message, context)

    result = started(Mixed())
    assert [client.client for client in result.records[0].clients] == [0, 1]
    assert "fixedclipping_mod cannot be a mod of this app" in log.text


@listed("place", PLACES)
def test_mods_that_only_look_work(place: str, log: pytest.LogCaptureFixture) -> None:
    plain = started(with_mods([], [], []), rounds=2)
    for mods in ([older.message_size_mod], [newer.arrays_size_mod], [newer.message_size_mod, older.arrays_size_mod]):
        result = started(PLACES[place](mods), rounds=2)
        assert result.evaluate_metrics_clientapp == plain.evaluate_metrics_clientapp
        assert all((array.numpy() == plain.arrays[name].numpy()).all() for name, array in result.arrays.items())
    assert "Outgoing message size: " in log.text
    assert "fl-bn/weights" in log.text  # arrays_size_mod's


def test_a_mod_of_one_s_own_works() -> None:
    seen: list[str] = []

    def mine(message: Message, context: Context, handle: Any) -> Message:
        seen.append(message.metadata.message_type)
        reply: Message = handle(message, context)
        if message.metadata.message_type == "train":
            reply.content.metric_records["metrics"]["by-my-mod"] = 3.0
        return reply

    result = started(with_mods([Gate(), mine], [], []))
    assert result.train_metrics_clientapp[1]["by-my-mod"] == 3.0
    assert set(seen) == {"query.hello", "train", "evaluate"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # opacus's and torch's
def test_opacus_in_an_app_of_one_s_own() -> None:
    opacus = pytest.importorskip("opacus")
    method, app, spent = METHODS["gn"](), ClientApp(), list[float]()
    answer(app, net, method, lambda context: data(client_of(context)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        x, y = (torch.cat(parts) for parts in zip(*data(client_of(context)), strict=True))
        engine = opacus.PrivacyEngine()
        with training(message, context, net(), method) as round:
            model, optimizer, loader = engine.make_private(
                module=round.model,
                optimizer=torch.optim.SGD(round.model.parameters(), lr=0.1),
                data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )
            for some, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(some), labels).backward()
                optimizer.step()
        spent.append(engine.get_epsilon(1e-5))
        return round.message(SAMPLES)

    result = OwnAppStrategy(net(), method, fraction_evaluate=0).start(InProcessGrid(app, CLIENTS, {}), num_rounds=2)
    assert [len(record.accepted) for record in result.records] == [CLIENTS] * 2
    assert len(spent) == 2 * CLIENTS
    assert all(0 < epsilon < 100 for epsilon in spent)


# checkpoints, trackers


def test_a_checkpoint_of_one_s_own_loads(tmp_path: Path) -> None:
    """``torch.save`` of what the hooks return, and a second run from it."""

    class Keeps(FixBN):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            assert arrays is not None
            torch.save(arrays.to_torch_state_dict(), tmp_path / f"{server_round}.pt")
            return arrays, metrics

    grid = InProcessGrid(own_app("fixbn"), CLIENTS, {})
    result = Keeps(net(), fraction_evaluate=0, freeze_after=5).start(grid, num_rounds=2)
    state = torch.load(tmp_path / "2.pt", weights_only=True)
    net(3).load_state_dict(state, strict=True)
    assert all(torch.equal(torch.from_numpy(a.numpy().copy()), state[n]) for n, a in result.arrays.items() if not n.endswith("tracked"))
    again = FixBN(net(), fraction_evaluate=0).start(InProcessGrid(own_app("fixbn"), CLIENTS, {}), ArrayRecord(state), num_rounds=1)
    assert again.records[0].loss != result.records[0].loss  # not from the beginning
    assert again.records[0].loss < result.records[0].loss


def test_a_tracker_in_a_hook_has_all_metrics() -> None:
    told: dict[str, float] = {}

    class Tracks(FedAvgBN):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            told.update(numbers_of(metrics or MetricRecord()))
            return arrays, metrics

        def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> Any:
            metrics = super().aggregate_evaluate(server_round, replies)
            told.update(numbers_of(metrics or MetricRecord()))
            return metrics

    Tracks(net()).start(InProcessGrid(own_app("fedavg"), CLIENTS, {}), num_rounds=1)
    assert set(told) == {"my_acc", "my_f1", "loss", "samples", "eval_loss", "eval_acc"}


WANDB = """
import sys
import wandb
from flwr.app import ArrayRecord, ConfigRecord
from fl_bn.flower import FedBN, InProcessGrid
from fl_bn.flower.compat import identify
from tests.flower.own_apps import net, own_app

identify(1)
strategy, grid, arrays = FedBN(net()), InProcessGrid(own_app("fedbn"), 3, {}), ArrayRecord(net().state_dict())
with wandb.init(mode="offline", dir=sys.argv[1]) as run:
    for number in (1, 2):
        replies = grid.send_and_receive(strategy.configure_train(number, arrays, ConfigRecord(), grid))
        arrays, metrics = strategy.aggregate_train(number, replies)
        wandb.log(dict(metrics), step=number)
    print(run.summary["my_acc"], run.summary["loss"])
"""


@pytest.mark.slow
def test_wandb_has_the_metrics_of_a_loop_of_one_s_own(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = subprocess.run(
        [sys.executable, "-c", WANDB, str(tmp_path)], capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    accuracy, loss = map(float, done.stdout.splitlines()[-1].split())
    assert accuracy == pytest.approx(0.2)
    assert loss > 0
    assert [*tmp_path.rglob("*.wandb")]


# ways to start


class Composed(dict[str, Any]):
    """As Hydra's: values by attribute, too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def test_a_main_with_a_config_and_a_folder_of_its_own_keeps_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hydra calls it: with a nested config, in the folder of its outputs."""
    server_app, client_app = ServerApp(), own_app("fedbn", rate=lambda message: float(str(message.content.config_records["config"]["lr"])))

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        optimizer: Any = context.run_config["optimizer"]
        result = FedBN(net()).start(grid, num_rounds=int(context.run_config["rounds"]), train_config=config(lr=optimizer["lr"]))
        torch.save(result.arrays.to_torch_state_dict(), "model.pt")

    def main(cfg: Composed) -> None:
        values: Mapping[str, Any] = {**cfg}
        run_in_process({"clients": cfg.num_clients, **values}, server_app=server_app, client_app=client_app)

    monkeypatch.chdir(tmp_path)
    main(Composed(num_clients=CLIENTS, rounds=2, optimizer={"name": "sgd", "lr": 0.05}))
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]
    assert "0.weight" in torch.load("model.pt", weights_only=True)


def test_the_older_api_is_refused_in_one_sentence() -> None:
    """``start_simulation`` and ``start_server`` both come to this server."""
    from flwr.server import Server, SimpleClientManager

    says = r"^FixBN works with Flower's message API only, not with start_simulation, .* call strategy.start\(grid, ...\) in @app.main\(\)"
    with pytest.raises(RunFailed, match=says):
        Server(client_manager=SimpleClientManager(), strategy=FixBN(net())).fit(num_rounds=1, timeout=None)  # type: ignore[arg-type]


def test_a_client_fn_is_refused_in_one_sentence() -> None:
    from flwr.client import NumPyClient

    class Legacy(NumPyClient):
        pass

    app = ClientApp(client_fn=lambda context: Legacy().to_client())
    says = r"^a ClientApp with a client_fn answers no question of an fl-bn strategy: write legacy_client_app\(client_fn, method\) in its"
    with pytest.raises(ValueError, match=says):
        answer(app, net, METHODS["fixbn"](), lambda context: data(0))
    with pytest.raises(RunFailed, match=says):
        FixBN(net()).start(InProcessGrid(app, CLIENTS, {}), num_rounds=1)
