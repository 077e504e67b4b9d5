"""What the texts of some keys of the run config mean, and all keys as a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

import tomli_w

from fl_bn.options import Key
from fl_bn.robust import PREAGGREGATIONS, RULES, rule_named
from fl_bn.support.client_names import SITE
from fl_bn.support.names import names_of

LONGEST = 255  # bytes of a file's name
RULE_NAMES = f"{', '.join(RULES)}; before it {' or '.join(f'{name}+' for name in PREAGGREGATIONS)}"
LIKE_RULES = [*RULES, *(f"{before}+{rule}" for before in PREAGGREGATIONS for rule in RULES)]


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


def sites_of(text: str) -> tuple[str, ...]:
    """``"east, west"`` as ("east", "west"); empty of an empty text.

    Raises:
        ValueError: it is no list of names of sites, or has a name twice.
    """
    names = names_of(text)
    if not all(map(SITE.fullmatch, names)) or len({name.casefold() for name in names}) < len(names):
        raise ValueError(f"expected NAME,NAME,..., each site once, but got {text!r}")
    return names


known_sites = parses(sites_of)


def all_of(known: Collection[str]) -> Callable[[str], bool]:
    """A check of lists of such names."""
    return lambda text: all(name in known for name in names_of(text))


SECTIONS = {
    "method": "Method",
    "model": "Network and task",
    "dataset": "Data",
    "partition": "Who has which data",
    "share-label-counts": "What clients tell of themselves",
    "calibrate": "Calibration of the statistics",
    "clients": "Clients and rounds",
    "min-replies": "Clients that are late or missing",
    "checkpoint-every": "Checkpoints",
    "exchange": "Layer-wise exchange",
    "byzantine": "Byzantine clients and robust rules",
    "secure-aggregation": "Secure aggregation and noise",
    "local-epochs": "Local training",
    "objective": "Local objective",
    "server-optimizer": "Server optimizer",
    "evaluate-every": "Evaluation",
    "seed": "Seed and machine",
    "output": "Output",
}
"""The headings of docs/config.md, each by its first key; options stand with the key that chooses whose they are."""


def table(keys: Mapping[str, Key]) -> str:
    """Every key in Markdown, a table per section, as printed in docs/config.md."""
    lines: list[str] = []
    for key in keys.values():
        if key.name in SECTIONS or not lines:
            heading = [f"## {SECTIONS[key.name]}", ""] if key.name in SECTIONS else []
            lines += [*([""] if lines else []), *heading, "| key | default | values | meaning |", "|---|---|---|---|"]
        default = str(key.default).lower() if isinstance(key.default, bool) else key.default
        lines.append(f"| `{key.name}` | {f'`{default}`' if default != '' else 'empty'} | {key.shown} | {key.help} |")
    return "\n".join(lines)


def defaults(keys: Mapping[str, Key]) -> str:
    """Return every key's default as TOML, as in ``[tool.flwr.app.config]`` of pyproject.toml."""
    return tomli_w.dumps({key.name: key.default for key in keys.values()}).rstrip("\n")
