"""What a key of the run config is made of: a default, a meaning, and the values it takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any

from fl_bn.data.shift import SHIFTS
from fl_bn.robust import PREAGGREGATIONS, RULES, rule_named

Value = str | int | float | bool
LONGEST = 255  # bytes of a file's name
LARGEST = 3.4e38  # of float32


def key(default: Value, text: str, allowed: str | tuple[str, ...], check: Callable[[Any], bool] | None = None) -> Any:
    """A config key: its default, what it means with its unit, and what values it takes."""
    shown = allowed if isinstance(allowed, str) else ", ".join(allowed)
    test = check if check is not None else (allowed.__contains__ if isinstance(allowed, tuple) else lambda value: True)
    return field(default=default, metadata={"help": text, "allowed": shown, "check": test})


def at_least(bound: float) -> Callable[[float], bool]:
    return lambda value: value >= bound


def between(low: float, high: float) -> Callable[[float], bool]:
    return lambda value: low <= value <= high


def weight(value: float) -> bool:
    return 0 < value <= 1


def above(bound: float) -> Callable[[float], bool]:
    return lambda value: value > bound


RULE_NAMES = f"{', '.join(RULES)}; before it {' or '.join(f'{name}+' for name in PREAGGREGATIONS)}"


def parses(parse: Callable[[str], object]) -> Callable[[str], bool]:
    """A check of what ``parse`` takes without a ValueError."""

    def check(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    return check


known_rule = parses(rule_named)


def known_device(name: str) -> bool:
    return name in ("auto", "cpu") or re.fullmatch(r"cuda(:\d+)?", name) is not None


DIAGNOSTICS = ("training-loss", "drift", "gradients")


def names_of(text: str) -> tuple[str, ...]:
    """The parts of a list separated by commas; none of an empty one."""
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def joins_of(text: str) -> dict[int, int]:
    """``"4:10, 5:20"`` as {client: first round}; empty of an empty text.

    Raises:
        ValueError: it is not of that form, or names a client twice.
    """
    pairs = [re.fullmatch(r"(\d+)\s*:\s*(\d+)", part) for part in names_of(text)]
    joins = {int(pair[1]): int(pair[2]) for pair in pairs if pair}
    if len(joins) < len(pairs):
        raise ValueError(f"expected CLIENT:ROUND,..., each client once, but got {text!r}")
    return joins


known_joins = parses(joins_of)


def nodes_of(text: str) -> tuple[int, ...]:
    """``"17, 4"`` as (17, 4); empty of an empty text.

    Raises:
        ValueError: it is no list of Flower's node ids, or names a node twice.
    """
    names = names_of(text)
    nodes = tuple(int(name) for name in names if re.fullmatch(r"\d{1,20}", name, re.ASCII))
    if len(set(nodes)) < len(names):
        raise ValueError(f"expected NODE,NODE,..., each node once, but got {text!r}")
    return nodes


known_nodes = parses(nodes_of)


def known_shifts(text: str) -> bool:
    return all(name in SHIFTS for name in names_of(text))


def known_diagnostics(text: str) -> bool:
    return all(name in DIAGNOSTICS for name in names_of(text))


def unfit(value: Value) -> str:
    """What a value of its type must be to be written to files, and to travel; empty where it is."""
    if isinstance(value, float) and not abs(value) <= LARGEST:
        return "a finite number"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "a whole number of at most 63 bits"
    if isinstance(value, str) and (any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in value)):
        return "a text without control characters"
    return ""


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def kebab(name: str) -> str:
    return name.replace("_", "-")


def table(config: type) -> str:
    """Every key as a Markdown table, as printed in docs/config.md."""
    rows = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for spec in fields(config):
        default = str(spec.default).lower() if isinstance(spec.default, bool) else spec.default
        shown = f"`{default}`" if default != "" else "empty"
        rows.append(f"| `{kebab(spec.name)}` | {shown} | {spec.metadata['allowed']} | {spec.metadata['help']} |")
    return "\n".join(rows)
