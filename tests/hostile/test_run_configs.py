"""Random keys and values of the run config: a config, or a sentence that says what is wrong, never a traceback."""

from __future__ import annotations

import random
from typing import Any

from fl_bn.run.config import ConfigError, RunConfig

NUMBERS = [0, 1, 2, 7, -1, 31, 2**31, 2**63, -(2**70), 0.0, 1e-300, 0.01, 0.5, 1.0, 1.5, 50.0, 1e38, -0.1, float("inf"), float("nan")]
TEXTS = [
    "", " ", "none", "auto", "x" * 5000, "a\0b", "a\nb", "\ud800", "../..", "-rf", "~", "/", "%s%n", "{0}", "'; --", "0:1,0:2", ":", "-1:3",
    "0.5:nan", "nnm+median", "nnm+nnm+median", "+", "os:system", "torch.hub:load", "no.such:thing", "a:b:c", "/dev/null", "latest",
]  # fmt: skip
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
        assert text.strip(), values
        assert "Traceback" not in text, values
        assert len(text) < 3000, values
        return "refused"
    return "accepted"


def test_no_config_is_read_with_a_traceback() -> None:
    rng = random.Random(7)
    found = [read(some_config(rng)) for _ in range(600)]
    assert min(found.count("refused"), found.count("accepted")) > 60  # control: both come
