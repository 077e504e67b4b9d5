"""Random keys and values of the run config: a config, or a sentence that says what is wrong, never a traceback."""

from __future__ import annotations

import random
from typing import Any

from fl_bn.app.config import ConfigError, RunConfig

NUMBERS = [0, 1, 2, 31, -1, 2**31, -(2**70), 0.0, 1e-300, 0.5, 1.0, 1e38, float("inf"), float("nan")]
TEXTS = ["none", "../..", "~", "{0}", "0:1,0:2", "0.5:nan", "nnm+nnm+median", "+", "os:system", "a:b:c"]
TEXTS += ["", " ", "x" * 5000, "a\0b", "\ud800"]
OTHERS: list[Any] = [None, [], {}, b"bytes", (1, 2), True]


def some_config(rng: random.Random) -> dict[str, Any]:
    """Return a few keys with random values, most of them of the key's own type; now and then a key that does not exist."""
    keys, values = RunConfig.keys(), dict[str, Any]()
    for name in rng.sample(sorted(keys), rng.choice([1, 1, 2, 3, 6])):
        key, usual = keys[name], list[Any](NUMBERS)
        if type(key.default) is bool:
            usual = [True, False]
        elif type(key.default) is str:
            usual = [part for part in key.shown.split(", ") if key.allows(part)] or TEXTS
        values[name] = rng.choice(rng.choice([usual, usual, usual, TEXTS, OTHERS]))
    return values | ({rng.choice(["", "Rounds", "learning_rate", "\0", "rounds "]): 1} if rng.random() < 0.02 else {})


def read(values: dict[str, Any]) -> str:
    try:
        config = RunConfig.from_mapping(values)
        config.build_method(), config.local_training(), config.defence(), config.secure(), config.round_policy(), config.to_mapping()
    except ConfigError as error:
        text = str(error)
        assert 0 < len(text) < 3000, values
        return "refused"
    return "accepted"


def test_no_config_is_read_with_a_traceback() -> None:
    rng = random.Random(7)
    found = [read(some_config(rng)) for _ in range(600)]
    assert min(found.count("refused"), found.count("accepted")) > 60  # control: both come
