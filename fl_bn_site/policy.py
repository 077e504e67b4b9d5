"""Read and check a site's policy, ``policy.toml``: which runs this site takes part in.

It is checked before any code of a run is loaded. The file belongs to the site. A run can neither read nor
change it: the checks are made by ``app_host.py``, which is installed at the site, and not by the code that a
run brings. A line that is missing allows everything.

This file imports nothing but the standard library, so that ``app_host.py`` can load it by its path.
"""

from __future__ import annotations

import io
import re
import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FILE = "policy.toml"
FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # package.module:function
CODE = ("sent", "installed")
PACKAGE = "fl_bn/"  # what code = "installed" compares
BATCHES = ("batch-size", "hbn-stat-samples")  # keys of the run config: samples that statistics summarise; 0: all of the site's
GB = 1 << 30


class PolicyError(ValueError):
    """The policy file is wrong. The message names the file and the line."""


class NotAllowed(Exception):
    """The site's policy refuses a run or a reply. The message has the line and what it allows."""


@dataclass(frozen=True)
class Policy:
    """Hold the lines of ``policy.toml``; None: everything is allowed.

    Attributes:
        allow_methods: Values of the run config's ``method``.
        allow_modules: Modules of which a run config may name a function.
        allow_code: ``sent``: the code that the server sends; ``installed``: only code that equals the fl-bn
            that is installed here.
        max_memory: GB that the process of a message may hold.
        min_samples: The fewest samples that a statistic or a reply may summarise.
        max_evaluations: How many evaluations a run gets an answer to.
        max_unknown_rounds: How many earlier rounds of a secure sum may have happened without this site.
    """

    allow_methods: tuple[str, ...] | None = None
    allow_modules: tuple[str, ...] | None = None
    allow_code: str = "sent"
    max_memory: float | None = None
    min_samples: int = 0
    max_evaluations: int | None = None
    max_unknown_rounds: int | None = None

    @classmethod
    def read(cls, file: Path | None) -> Policy:
        """Read the policy in ``file``; no file allows everything.

        Raises:
            PolicyError: The file cannot be read, or a line is unknown or not allowed.
        """
        if file is None or not file.exists():
            return cls()
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise PolicyError(f"{file} cannot be read: {error}") from error
        known = {spec.name.replace("_", "-"): spec.name for spec in fields(cls)}
        if others := sorted(values.keys() - known.keys()):
            raise PolicyError(f"{file}: there is no line {others[0]!r}; there are {', '.join(known)}")
        return cls(**{known[name]: _check_line(file, name, value) for name, value in values.items()})

    def check_run(self, run_config: Mapping[str, Any]) -> None:
        """Raise NotAllowed where this site takes no part in a run with this config."""
        if self.allow_methods is not None and run_config.get("method") not in self.allow_methods:
            raise _refusal("allow-methods", self.allow_methods, f"the run's method is {run_config.get('method')!r}")
        if self.allow_modules is not None:
            for key, value in run_config.items():
                for name in FUNCTION.finditer(value) if isinstance(value, str) else ():
                    module = name[0].partition(":")[0]
                    if not any(f"{module}.".startswith(f"{allowed}.") for allowed in self.allow_modules):
                        raise _refusal("allow-modules", self.allow_modules, f"the run config names {key}={name[0]!r}")
        for key in BATCHES:
            if 0 < int(run_config.get(key, 0)) < self.min_samples:
                raise _refusal("min-samples", self.min_samples, f"the run config has {key}={run_config[key]}: statistics of so few samples")

    def check_code(self, fab: bytes, package: Path) -> None:
        """Raise NotAllowed where only installed code may run, and a run brings another fl-bn.

        No code of the run is loaded then. It is refused because two versions would not compute the same.

        Args:
            fab: The app that the run brings, a zip file.
            package: The folder of the fl-bn that is installed here.
        """
        if self.allow_code != "installed":
            return
        with zipfile.ZipFile(io.BytesIO(fab)) as archive:
            sent = {name: archive.read(name) for name in archive.namelist() if name.startswith(PACKAGE) and name.endswith(".py")}
        if f"{PACKAGE}__init__.py" not in sent:
            raise _refusal("allow-code", self.allow_code, "the run brings an app that is not fl-bn's")
        for name, content in sorted(sent.items()):
            mine = package / name.removeprefix(PACKAGE)
            if not mine.is_file() or mine.read_bytes() != content:
                raise _refusal("allow-code", self.allow_code, f"the run has another {name} than this site: install the server's version")

    def check_reply(self, samples: int | None, counts: Mapping[str, int]) -> None:
        """Raise NotAllowed where a reply summarises fewer samples than the policy allows.

        Args:
            samples: The samples that the reply summarises; None: it does not say.
            counts: Values per channel, by the layer's tensor; 0: the layer did not run.
        """
        if samples is not None and 0 < samples < self.min_samples:
            raise _refusal("min-samples", self.min_samples, f"the reply summarises {samples} samples")
        for name, count in counts.items():
            if 0 < count < self.min_samples:
                raise _refusal("min-samples", self.min_samples, f"the statistic {name} is of {count} values")

    def limits(self, node_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``node_config`` with the limits that the app itself enforces.

        Where both name a limit, the stricter one holds.
        """
        limits = dict(node_config)
        if self.min_samples:
            limits["min-samples"] = max(self.min_samples, limits.get("min-samples", 0))
        for name, most in (("max-evaluations", self.max_evaluations), ("max-unknown-rounds", self.max_unknown_rounds)):
            if most is not None:
                limits[name] = min(most, limits.get(name, most))
        return limits

    def memory(self) -> int | None:
        """Return ``max_memory`` in bytes; None: there is no limit."""
        return None if self.max_memory is None else int(self.max_memory * GB)


def summary_of(reply: Any) -> tuple[int | None, dict[str, int]]:
    """Return how many samples a reply summarises, if it says so, and how many values each of its statistics does."""
    if reply.has_error():
        return None, {}
    samples = [record["samples"] for record in reply.content.metric_records.values() if "samples" in record]
    moments = reply.content.array_records.get("moments", {})
    counts = {name: int(array.numpy().max()) for name, array in moments.items() if name.endswith("count")}
    return (int(samples[0]) if samples else None), counts


def _refusal(line: str, allowed: object, reason: str) -> NotAllowed:
    shown = ", ".join(map(str, allowed)) or "nothing" if isinstance(allowed, tuple) else allowed
    return NotAllowed(f"this site's policy has {line} = {shown}, but {reason}")


def _check_line(file: Path, name: str, value: Any) -> Any:
    """Return the value of the line ``name``. Raises PolicyError where it is not allowed."""

    def wrong(expected: str) -> PolicyError:
        return PolicyError(f"{file}: {name} must be {expected}, but got {value!r}")

    if name in ("allow-methods", "allow-modules"):
        if not isinstance(value, list) or not all(type(item) is str for item in value):
            raise wrong("a list of texts in quotes")
        return tuple(value)
    if name == "allow-code":
        if value not in CODE:
            raise wrong(" or ".join(CODE))
        return value
    if name in ("max-evaluations", "max-unknown-rounds"):
        if type(value) is not int or value < 0:
            raise wrong("a whole number, 0 for none")
        return value
    if type(value) not in ((int,) if name == "min-samples" else (int, float)) or not value > 0:
        raise wrong("a whole number above 0" if name == "min-samples" else "a number of GB above 0")
    return value
