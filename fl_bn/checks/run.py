"""Check this machine, and a run on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from fl_bn.checks import experiment, machine
from fl_bn.checks.guard import guard, guard_each
from fl_bn.support.finding import Finding


def this_machine() -> Iterator[Finding]:
    """Check packages, memory and clock of this machine."""
    yield guard("python", machine.python)
    for name in machine.PACKAGES:
        yield guard(name, partial(machine.package, name))
    yield guard("memory", machine.memory)
    yield guard("time service", machine.time_service)


def diagnose(overrides: str = "") -> Iterator[Finding]:
    """Check this machine, and a run on it.

    Args:
        overrides: Keys of the run config, as text: ``"method='fbn' rounds=10"``, or the path of a .toml file.

    Yields:
        The findings of each check. Anything that is wrong is a finding; nothing is raised.
    """
    yield from this_machine()
    yield from guard_each("run config", lambda: _run_here(overrides))


def _run_here(overrides: str) -> Iterator[Finding]:
    values = parse(overrides)
    yield from [values] if isinstance(values, Finding) else run(values)


def run(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Make the checks of a run that its server needs: run config, GPU, data and model.

    Args:
        values: Keys of the run config.

    Yields:
        The finding of each check.
    """
    finding, config = experiment.run_config(values)
    yield finding
    if config is not None:
        yield guard("gpu", lambda: machine.gpu(config.device, "run config"))
        yield guard("data", lambda: experiment.run_data(config))
        yield guard("model", lambda: experiment.model_layers(config))


def parse(overrides: str) -> dict[str, Any] | Finding:
    """Return the keys that ``overrides`` sets, or a finding if they cannot be read."""
    from fl_bn.run.config import ConfigError
    from fl_bn.run.overrides import parse_overrides

    try:
        return parse_overrides(overrides)
    except ConfigError as error:
        return experiment.refusal(error)
