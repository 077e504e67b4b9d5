"""The run config: every key checked by name, the same defaults in pyproject, and sentences that say what to do."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.federation.rounds import AS_METHOD
from fl_bn.methods import METHODS, Refresh, StatisticsReport
from fl_bn.methods.fbn import FBNOptions
from fl_bn.options import kebab
from fl_bn.run.config import FEDTAN, ConfigError, RunConfig
from fl_bn.run.keys import SECTIONS, table
from fl_bn.run.overrides import parse_overrides
from fl_bn.run.run_directory import to_toml
from tests.listed import listed

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
KEYS = RunConfig.keys()
FILES = {"exchange-certificate", "exchange-key", "exchange-authority"}
FREE = {
    "model",
    "dataset",
    "data-path",
    "output",
    "exchange-host",
    "exchange-bind",
    "resume",
    "run-signature",
    "model-weights",
    "learning-rate-milestones",
    "hold-out",
} | FILES  # any text: checked where they are used
WRONG: dict[str, list[object]] = {
    "freeze-after": [-2], "early-stop": [-1], "frozen-rate": [-0.1, 1.1], "validation-share": [-0.1, 0.95], "groups": [0],
    "fbn-momentum": [-0.1, 1.1], "tracking": [-0.1, 1.1], "hbn-lam": [-0.1, 1.5],
    "hbn-stat-samples": [-2, 1],
    "image-size": [-1, 5000], "partition-parameter": [-0.5], "calibrate": [-3], "clients": [-1], "fraction": [0.0, 1.01],
    "recalibration-memory": [-1.0],
    "rounds": [-1, 0], "min-replies": [-0.1, 1.1], "min-sites": [-1],
    "max-failed-rounds": [0], "round-timeout": [0.0], "wait-timeout": [-1.0],
    "local-epochs": [-1], "local-steps": [-1], "batch-size": [1], "learning-rate": [0.0], "learning-rate-decay": [0.0, 1.1],
    "momentum": [-0.1, 1.0], "weight-decay": [-1e-9], "server-learning-rate": [0.0], "server-momentum": [-0.1, 1.0],
    "server-beta2": [-0.1, 1.0], "server-adaptivity": [0.0], "fedprox-mu": [-0.1], "scaffold-option": [0, 3], "scaffold-strength": [-1.0],
    "moon-mu": [-1.0], "moon-temperature": [0.0], "moon-projection": [-1], "fedsam-rho": [-0.1], "clip-limit": [0.0],
    "secagg-shares": [-1], "secagg-threshold": [-1], "secagg-clipping-range": [0.0, 1e38], "secagg-quantization-range": [3, 31],
    "dp-noise": [-0.1], "dp-clip": [0.0], "dp-statistics-clip": [0.0], "dp-delta": [0.0, 1.0],
    "callbacks": ["mlflow", "trackers:MLflow, x"],
    "evaluate-every": [0], "seed": [-1], "device": ["tpu", "gpu", ""], "threads": [0], "workers": [-1, 1025], "name": ["a/b", "..", " a"],
    "retry-timeout": [-1.0], "classes": [-1], "channels": [-1], "min-cohort": [0, -1], "checkpoint-every": [-1],
    "clients-at-start": [-1], "client-nodes": ["a", "-1", "7,7", "1,", "9" * 21],
    "client-names": ["a b", "a,A", "a,", "../x"],
    "join-rounds": ["4", "4:", "a:1", "1:2,1:3", "1:2;2:3", "-1:2", "1:2,"],
    "byzantine": [-1], "attack-strength": [float("nan"), float("inf")], "declared-byzantine": [-2],
    "shifts": ["upside-down", "none,,invert"], "samples-per-domain": [-1], "samples-share": [0.0, 1.1], "diagnostics": ["loss"],
    "exchange-timeout": [0.0], "exchange-join-timeout": [-1.0], "exchange-port": [-1, 65536],
}  # fmt: skip
SHAPE = {"classes": 2, "channels": 1, "image_size": 4}


def config(**values: object) -> RunConfig:
    return RunConfig.from_mapping({kebab(key): value for key, value in values.items()})


def test_pyproject_states_the_defaults_key_by_key_in_order() -> None:
    stated = tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"]
    defaults = {name: key.default for name, key in KEYS.items()}
    assert list(stated.items()) == list(defaults.items())
    assert [type(value) for value in stated.values()] == [type(value) for value in defaults.values()]


def test_the_simulation_of_pyproject_has_as_many_supernodes_as_the_run_clients() -> None:
    federations = tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["federations"]
    simulated = [value for value in federations.values() if "options" in value]
    assert len(simulated) >= 2
    assert {value["options"]["num-supernodes"] for value in simulated} == {RunConfig().clients}


@listed("name", KEYS)
def test_every_key_has_a_meaning_and_says_what_it_takes(name: str) -> None:
    key = KEYS[name]
    assert key.help
    assert key.shown
    assert key.check(key.default) == key.default
    assert f"| `{name}` |" in table(KEYS)


def test_the_page_has_a_table_per_section_and_a_key_in_each() -> None:
    assert [name for name in KEYS if name in SECTIONS] == list(SECTIONS)
    assert next(iter(KEYS)) in SECTIONS
    parts = table(KEYS).split("## ")[1:]
    assert [part.partition("\n")[0] for part in parts] == list(SECTIONS.values())
    rows = [re.findall(r"^\| `([a-z0-9-]+)` \|", part, re.MULTILINE) for part in parts]
    assert [row[0] for row in rows] == list(SECTIONS)
    assert sum(rows, []) == list(KEYS)
    assert "freeze-what" in rows[0], "options stand with what they belong to"


@listed("name", KEYS)
def test_every_key_refuses_the_wrong_type_by_name(name: str) -> None:
    kind = type(KEYS[name].default)
    for wrong in ("3", 3, 3.5, True, None, [1]):
        fits = type(wrong) is kind or (kind is float and type(wrong) is int)
        if not fits:
            with pytest.raises(ConfigError, match=f"{name} must be of type {kind.__name__}, but got"):
                RunConfig.from_mapping({name: wrong})


@listed("name", KEYS)
def test_every_key_refuses_what_is_out_of_range_by_name(name: str) -> None:
    kind = type(KEYS[name].default)
    chosen = [value for value in ("nonsense",) if kind is str and name not in FREE | {"name"}]
    for wrong in [*WRONG.get(name, []), *chosen]:
        with pytest.raises(ConfigError, match=f"{name} must be .*, but got"):
            RunConfig.from_mapping({name: wrong})
    assert name in WRONG or name in FREE or kind is bool or chosen  # no key is forgotten here


def test_an_unknown_key_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown config key 'learning_rate': did you mean 'learning-rate'?"):
        RunConfig.from_mapping({"learning_rate": 0.1})
    with pytest.raises(ConfigError, match="unknown config key 'xyzzy' \\(known: method, groups, "):
        RunConfig.from_mapping({"xyzzy": 1})


@listed("name", KEYS)
def test_no_key_takes_what_cannot_be_written_or_sent(name: str) -> None:
    kind = type(KEYS[name].default)
    said = "a finite number|a whole number of at most 63 bits|a text without control characters"
    unfit: dict[type, list[object]] = {
        float: [math.inf, -math.inf, math.nan, 1e39],
        int: [2**63, -(2**63) - 1, 10**40],
        str: ["a\0b", "a\nb", "\x7f", "\ud800"],
    }
    for wrong in unfit.get(kind, []):
        with pytest.raises(ConfigError, match=f"^{name} must be ({said}), but got"):
            RunConfig.from_mapping({name: wrong})


def test_names_are_as_long_as_files_allow() -> None:
    assert config(name="\u20ac" * 85).name
    with pytest.raises(ConfigError, match="name must be at most 255 bytes long, but got 600: '\u20ac"):
        config(name="\u20ac" * 200)
    with pytest.raises(ConfigError, match="clients must be 0 or 1..100000, but got 10000000"):
        config(clients=10_000_000)


def test_an_integer_is_a_float_too_but_not_the_reverse() -> None:
    made = config(learning_rate=1)
    assert type(made.learning_rate) is float
    assert made == config(learning_rate=1.0)
    with pytest.raises(ConfigError, match="rounds must be of type int, but got 3.0"):
        config(rounds=3.0)


@listed(
    ("values", "message"),
    [
        ({"local_epochs": 2, "local_steps": 9}, "give either local epochs or local steps, but got epochs=2 and steps=9"),
        ({"local_steps": 0}, "give either local epochs or local steps"),
        ({"objective": "scaffold"}, "it needs optimizer='sgd', momentum=0"),
        ({"objective": "scaffold", "momentum": 0.0, "clip": "norm"}, "and clip='none', but got"),
        ({"objective": "scaffold", "momentum": 0.0, "method": "fedtan"}, "take another objective"),
        ({"objective": "fedsam", "method": "fedtan2"}, "exchanges the statistics of the first batch only once"),
        ({"clip": "norm", "method": "fedtan"}, "set clip='none'"),
        ({"objective": "fedprox", "method": "single"}, "single shares no weights"),
        ({"objective": "fedprox", "update": "gradients", "local-steps": 1}, "sends one gradient"),
        ({"objective": "scaffold", "momentum": 0.0, "byzantine": 1, "clients": 5}, "no robust rule guards"),
        ({"maintain-momentum": "global", "statistics-rule": "median", "clients": 5}, "no robust rule guards"),
        ({"maintain-momentum": "local", "momentum": 0.0}, "needs momentum > 0"),
        ({"maintain-momentum": "local", "update": "gradients", "local-steps": 1}, "clients always keep their momentum between rounds"),
        ({"server-optimizer": "fedacg", "update": "gradients", "local-steps": 1}, "take fedavgm"),
        ({"server-optimizer": "fedacg", "server-learning-rate": 0.5}, "fedacg sets the weights to the clients' average"),
        ({"dp-noise": 1.0}, "dp-noise=1 has no effect with secure-aggregation=false"),
        ({"secure-aggregation": True, "unseen-client": True, "method": "fedbn"}, "clients send their own layers without encryption"),
        ({"secure-aggregation": True, "clients": 2}, "needs at least 3 clients in a sum"),
        ({"secure-aggregation": True, "method": "fedtan"}, "layer by layer in the clear"),
        ({"secure-aggregation": True, "statistics-rule": "median"}, "compares the clients' updates, and secure aggregation hides them"),
        ({"secure-aggregation": True, "maintain-momentum": "global"}, "would be sent unmasked"),
        ({"secure-aggregation": True, "payload-dtype": "bfloat16"}, "set payload-dtype to 'float32'"),
        ({"method": "fedtan2", "payload-dtype": "float16"}, "payload-dtype must be float32, but got 'float16'"),
        ({"secure-aggregation": True, "dp-noise": 1.0}, "set client-weights to 'uniform'"),
        ({"secure-aggregation": True, "secagg-shares": 4}, "an odd number from 3"),
        ({"server-momentum": 0.5}, "but got server-momentum=0.5: set it to 0"),
        ({"learning-rate-schedule": "milestones"}, "needs milestones: set learning-rate-milestones"),
        ({"learning-rate-schedule": "milestones", "learning-rate-milestones": "0.6"}, "like 0.6:0.1"),
        ({"learning-rate-schedule": "milestones", "learning-rate-milestones": "0.8:0.1,0.6:0.1"}, "rising shares"),
        ({"optimizer": "adam", "momentum": 0.5}, "optimizer='adam' has momentum parameters of its own"),
        ({"update": "gradients", "local_steps": 9}, r"update='gradients' sends the gradient of one batch .* but got steps=9"),
        ({"method": "fixbn", "freeze_after": 99, "rounds": 60}, "freeze-after must not exceed rounds=60, but got 99"),
        ({"method": "fedtan2", "freeze_after": 99, "rounds": 60}, "freeze-after must not exceed rounds=60, but got 99"),
        (
            {"method": "fedtan", "client_weights": "uniform"},
            "client-weights must be 'samples' for fedtan, but got 'uniform': the first step of fedtan equals centralised training only if",
        ),
        ({"method": "fedtan", "exchange_key": "server.key"}, "exchange-certificate, exchange-key and exchange-authority belong together"),
        (
            {"method": "fedtan", "exchange_host": "server.example"},
            "the exchange would listen at server.example without encryption: give exch",
        ),
        ({"resume": "latest"}, "resume needs output and checkpoint-every, with the values of the run that it continues"),
        ({"resume": "latest", "checkpoint_every": 1, "output": ""}, "resume needs output"),
        ({"clients": 3, "min_cohort": 4}, "min-cohort must not exceed 3, the number of clients in .* .out of clients=3., but got 4"),
        ({"clients": 10, "fraction": 0.5, "min_cohort": 6}, "must not exceed 5, .* .out of clients=10., but got 6: lower min-cohort"),
        ({"clients": 5, "join_rounds": "5:2"}, "join-rounds must name clients 0..4, since clients=5, but got client 5"),
        ({"rounds": 9, "join_rounds": "1:2,4:10"}, "join-rounds must name rounds 1..9, since rounds=9, but got 4:10"),
        ({"join_rounds": "4:0"}, "join-rounds must name rounds 1..100, since rounds=100, but got 4:0"),
        ({"clients": 2, "join_rounds": "0:2,1:3"}, "join-rounds must leave a client for round 1, but lets all 2 join later: '0:2,1:3'"),
        ({"clients": 3, "client_nodes": "7,8"}, "client-nodes must name a node for each of clients=3, but names 2"),
        ({"clients": 3, "client_names": "east,west"}, "client-names must be one name for each of clients=3, but got 2"),
        ({"clients": 5, "clients_at_start": 6}, "clients-at-start must not exceed clients=5, but got 6"),
        ({"clients": 5, "join_rounds": "4:2", "clients_at_start": 5}, "the 4 clients that join-rounds leaves for round 1, but got 5"),
        ({"clients": 5, "join_rounds": "4:2", "min_cohort": 5}, "exceed 4, .* of round 1 .out of the clients at the start., but got 5"),
        ({"clients": 5, "clients_at_start": 2, "min_cohort": 3}, "exceed 2, .* of round 1 .out of the clients at the start., but got 3"),
        ({"clients": 7, "clients_at_start": 4, "byzantine": 2, "statistics_rule": "median"}, "among at least 5, but got n=4"),
        ({"dataset": "sites"}, "dataset='sites': the server has no data .*: give classes, channels, image-size"),
        ({"dataset": "sites", "classes": 2, "image_size": 4}, "give channels$"),
        ({"dataset": "sites", **SHAPE, "byzantine": 1, "attack": "foe"}, "dataset='sites' has real clients"),
        ({"dataset": "sites", **SHAPE, "hold_out": "A"}, "dataset='sites' has no domains that hold-out could name"),
        (SHAPE, r"classes=\d+ has no effect with dataset='digits': it counts only with dataset='sites'"),
        ({"method": "fedtan", "exchange_bind": "0.0.0.0"}, "the exchange would listen at 0.0.0.0 without encryption"),
    ],
)
def test_keys_that_do_not_go_together(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**values)


def test_round_trip_through_the_mapping_and_through_toml() -> None:
    made = config(method="fbn", fraction=0.3, name='a "quoted" näme', pictures=False, weight_decay=1e-7, data_path="C:\\data")
    assert RunConfig.from_mapping(made.to_mapping()) == made
    assert RunConfig.from_mapping(tomllib.loads(to_toml(made.to_mapping()))) == made
    assert made != RunConfig()


def test_a_rate_of_frozen_rounds_needs_frozen_rounds() -> None:
    with pytest.raises(ConfigError, match=r"frozen-rate=0\.5 has no effect with method='fbn', .* where statistics freeze after"):
        RunConfig(method="fbn", frozen_rate=0.5)
    RunConfig(method="fbn", frozen_rate=0.5, freeze_after=3, rounds=5)
    RunConfig(method="fixbn", frozen_rate=0.5)


@given(text=st.text(st.characters(codec="utf-8")))
def test_every_text_survives_its_file(text: str) -> None:
    """What cannot be read again cannot be gone on with."""
    made = {"data-path": text, "rounds": 3}
    assert tomllib.loads(to_toml(made)) == made


@listed("name", METHODS)
def test_every_method_can_be_configured_and_frozen(name: str) -> None:
    assert config(method=name).build_method().name == name
    if name in ("static-bn", "gn", "ln", "in", "gn-ws", "fedfn", "fedwon", "fixup"):  # no statistics in training
        with pytest.raises(ConfigError, match=f"{name} has no running statistics in training"):
            config(method=name, freeze_after=2)
        return
    frozen = config(method=name, freeze_after=2).build_method()
    first = config(method=name).build_method().phase(1, 9).value
    assert first == ("exchange" if name in FEDTAN else "train")
    assert [frozen.phase(round, 9).value for round in (2, 3)] == [first, "frozen"]


def test_options_reach_the_method_and_the_rounds() -> None:
    assert config(method="hbn", hbn_stat_samples=64, hbn_lower_layers="hybrid").build_method().statistics_pass.samples == 64
    assert config(method="hbn").build_method().combine.keywords == {"tracking": 0.05, "lam": None, "merge": "unbiased"}  # type: ignore[attr-defined]
    assert config(method="hbn", fraction=0.5).build_method().combine.keywords == {"tracking": 0.01, "lam": None, "merge": "unbiased"}  # type: ignore[attr-defined]
    assert config(method="hbn", hbn_lam=0.3).build_method().combine.keywords["lam"] == 0.3  # type: ignore[attr-defined]
    for values, expected in (
        ({}, (FBNOptions.tracking, None, StatisticsReport.FIRST)),
        ({"fbn_momentum": 0.3}, (FBNOptions.tracking, 0.3, StatisticsReport.FIRST)),
        ({"tracking": 0.2, "fbn_report": "all"}, (0.2, None, StatisticsReport.BATCHES)),
        ({"fbn_report": "pass"}, (FBNOptions.tracking, None, StatisticsReport.PASS)),
    ):
        made = config(method="fbn", **values).build_method()
        assert made.combine.keywords == dict(zip(("tracking", "momentum", "report"), expected, strict=True))  # type: ignore[attr-defined]
        assert made.report is expected[2]
    for values, refresh in (
        ({}, Refresh.HYBRID),
        ({"hbn_lam": 0.5}, Refresh.HYBRID),
        ({"hbn_lam": 1.0}, Refresh.EXACT),
        ({"fraction": 0.5, "hbn_evaluate": "exact"}, Refresh.EXACT),
        ({"hbn_evaluate": "hybrid"}, Refresh.HYBRID),
    ):
        assert config(method="hbn", **values).build_method().refresh is refresh
    assert (config().round_policy().calibrate, config().round_policy().unit_scale) == (AS_METHOD, True)
    assert not config(unit_scale=False).round_policy().unit_scale
    rates = {"learning_rate": 0.05, "learning_rate_schedule": "step", "learning_rate_decay": 0.1}
    policy = config(
        min_replies=0.25, calibrate=2, min_cohort=3, checkpoint_every=4, evaluate_every=7, client_weights="uniform", **rates
    ).round_policy()
    assert (policy.min_replies, policy.calibrate, policy.evaluate_every, policy.client_weights) == (0.25, 2, 7, "uniform")
    assert (policy.min_cohort, policy.checkpoint_every, policy.at_clients) == (3, 4, False)
    assert config(dataset="sites", **SHAPE).round_policy().at_clients
    joining = config(clients=5, clients_at_start=2, join_rounds="3:1, 4 : 20").round_policy()
    assert (joining.at_start, joining.joining) == (2, {3: 1, 4: 20})
    assert (joining.starting(19), joining.starting(20)) == ({0, 1, 2, 3}, {0, 1, 2, 3, 4})
    assert config(precision="mixed").local_training().precision == "mixed"
    assert [policy.rate(round, 60) for round in (1, 30, 31, 46)] == pytest.approx([0.05, 0.05, 0.005, 0.0005])


def test_certificate_files_are_looked_for_at_the_server_alone(tmp_path: Path) -> None:
    names = {f"exchange_{name}": str(tmp_path / f"{name}.pem") for name in ("certificate", "key", "authority")}
    made = config(method="fedtan", exchange_host="server.example", **names)  # as a client makes it, which has none of them
    with pytest.raises(ConfigError, match="there is no file .*certificate.pem: correct exchange-certificate"):
        made.round_policy()
    assert config(method="fedtan", exchange_host="server.example", exchange_insecure=True).round_policy().exchange.listen_on == "0.0.0.0"


def test_the_fedtan_schedule_reaches_the_method() -> None:
    for name in FEDTAN:
        layers = [config(method=name, fedtan_schedule=schedule).build_method().layer for schedule in ("paper", "merged")]
        assert [layer.keywords["schedule"] for layer in layers] == ["paper", "merged"]  # type: ignore[union-attr]


def test_the_config_is_a_value() -> None:
    assert hash(RunConfig()) == hash(config())
    with pytest.raises(ConfigError, match="rounds must be >= 1, but got 0"):
        replace(RunConfig(), rounds=0)


def test_overrides_are_read_as_by_flwr_run_but_nothing_is_passed_over(tmp_path: Path) -> None:
    assert parse_overrides("rounds=10 method='hbn' learning-rate=0.5 pictures=false data-path=\"a b\"") == {
        "rounds": 10, "method": "hbn", "learning-rate": 0.5, "pictures": False, "data-path": "a b",
    }  # fmt: skip
    assert parse_overrides("") == {}
    (tmp_path / "mine.toml").write_text("rounds = 3\n")
    assert parse_overrides(str(tmp_path / "mine.toml")) == {"rounds": 3}
    for text, told in [
        ("rounds 10", "cannot read 'rounds 10'"),
        ("method=hbn", "quoted string: method='hbn'"),
        ("no.toml", "no.toml cannot be read"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(told)):
            parse_overrides(text)


@listed("value", ["9" * 5000, "[" * 5000, "1e999999999999999", '"a\nb"', "0x", "2020-01-01T", "{a=1", "\x00"])
def test_no_text_is_read_with_a_traceback(value: str) -> None:
    """tomllib itself raises other errors than its own for numbers of thousands of digits and lists within lists."""
    with pytest.raises(ConfigError, match="cannot read|rounds must be of type int"):
        RunConfig.from_mapping(parse_overrides(f"rounds={value}"))


@pytest.mark.parametrize("content", [b"rounds = \xff", b"rounds = " + b"9" * 5000, b"rounds = " + b"[" * 5000, b"rounds"])
def test_no_file_is_read_with_a_traceback(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read as a run config"):
        parse_overrides(str(tmp_path / "mine.toml"))
