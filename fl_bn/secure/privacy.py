"""Provide client-level differential privacy: noisy sums of updates and of statistics.

A client's update and its statistics (deviations, see ``additive``) are two vectors.
Each is scaled down to an L2 norm of at most its own clip C. Each gets so much
Gaussian noise that the cohort's secure sum has noise of standard deviation ``noise
* C`` or more.

Accounting is zero-concentrated DP: Concentrated Differential Privacy, Bun and
Steinke, TCC 2016. A Gaussian release of noise multiplier z costs ``rho = 1 / (2
z^2)`` (proposition 1.6), where neighbours differ in one client's vector, or 0.
Releases add up (lemma 1.7). ``rho`` implies ``(rho + 2 sqrt(rho ln(1 / delta)),
delta)`` (proposition 1.3). Sampling of the cohort is left out, so the figure is an
upper bound.

The noise is drawn from the operating system's entropy, so a run with privacy is not
reproducible. All know the run's seed, and who knows the noise can subtract it.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fl_bn.options import REQUIRED, Options, Used, option, used_with
from fl_bn.support.durable import append

MOST = 2  # releases of one exchange: of the updates and of the statistics


SECURE = used_with("secure-aggregation", True)
noisy_option = partial(option, used=SECURE & Used("dp-noise > 0", lambda config: config["dp-noise"] > 0))


@dataclass(frozen=True)
class Privacy(Options):
    """Describe how clients clip their vectors, and the noise that they add.

    Attributes:
        noise: the least standard deviation of a sum's noise, divided by the clip.
        delta: epsilon is stated for it; it should be well below one over the number
            of clients.

    Raises:
        ValueError: a value is out of range. A run config allows noise 0, this class
            does not.
    """

    name: ClassVar[str] = "privacy"
    prefix: ClassVar[str] = "dp"

    clip: float = noisy_option(REQUIRED, "with dp-noise: largest L2 norm of a client's update", "> 0", run=1.0)
    statistics_clip: float = noisy_option(REQUIRED, "with dp-noise: largest L2 norm of a client's standardised statistics", "> 0", run=1.0)
    noise: float = option(
        REQUIRED,
        "multiplier of the noise that clients add to their values before these are summed (needs client-weights=uniform); 0: none",
        ">= 0",
        run=0.0,
        used=SECURE,
    )
    delta: float = noisy_option(1e-5, "with dp-noise: delta at which epsilon is stated", "(0, 1)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise == 0:
            raise ValueError(f"privacy's noise must be > 0 (without it there is no privacy to account for), but got {self.noise}")


def norm(vector: Mapping[str, Tensor]) -> float:
    """Return the L2 norm of all tensors together."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in vector.values()))


def clipped(vector: Mapping[str, Tensor], clip: float) -> dict[str, Tensor]:
    """Scale ``vector`` down as a whole, in float64, if its L2 norm exceeds ``clip``."""
    length = norm(vector)
    factor = 1.0 if length <= clip else clip / length
    return {name: tensor.double() * factor for name, tensor in vector.items()}


def noisy(
    vector: Mapping[str, Tensor], clip: float, noise: float, contributors: int, rng: np.random.Generator | None = None
) -> dict[str, Tensor]:
    """Add one client's share of the noise to ``vector``, in float64.

    Its standard deviation is ``noise * clip / sqrt(contributors)``.
    ``contributors`` is the smallest number of clients whose sum the server may
    learn. A sum over more clients has more noise. Only tests give ``rng``.
    """
    rng = np.random.default_rng(secrets.randbits(256)) if rng is None else rng
    deviation = noise * clip / math.sqrt(contributors)
    return {name: t.double() + torch.from_numpy(np.asarray(rng.normal(0.0, deviation, tuple(t.shape)))) for name, t in vector.items()}


def noise_reach(noise: float, clip: float, contributors: int) -> float:
    """Return four standard deviations of one client's share of the noise."""
    return 4 * noise * clip / math.sqrt(contributors)


def rho(releases: int, noise: float) -> float:
    """Return rho, the cost of ``releases`` sums with noise of multiplier ``noise``."""
    return releases / (2 * noise**2)


def epsilon(releases: int, noise: float, delta: float) -> float:
    """Bound the epsilon of ``(epsilon, delta)``-DP after ``releases`` noisy sums from above."""
    cost = rho(releases, noise)
    return cost + 2 * math.sqrt(cost * math.log(1 / delta))


class Journal:
    """Record in a file how many releases (noisy sums that the server learns) a run made."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, releases: int) -> None:
        """Add a line that survives a crash, or raise ``OSError``."""
        append(self.path, json.dumps({"releases": releases}).encode() + b"\n")

    def total(self) -> int:
        """Return the sum of releases. A line that a crash cut short counts as ``MOST``."""
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        return sum(map(_released, filter(None, lines)))


def _released(line: bytes) -> int:
    try:
        releases = json.loads(line)["releases"]
    except (ValueError, KeyError, TypeError):
        return MOST
    return releases if type(releases) is int and releases >= 0 else MOST


class Accountant:
    """Count one run's releases.

    A training round has one for updates, and one if the method reports statistics.
    A statistics-only exchange has one.
    """

    def __init__(self, privacy: Privacy) -> None:
        self.privacy, self.releases = privacy, 0
        self._journal: Journal | None = None

    def keep_in(self, journal: Journal) -> None:
        """Add the total of ``journal`` to ``releases``, and record further ones there."""
        self.releases += journal.total()
        self._journal = journal

    def spend(self, releases: int) -> None:
        """Count and record ``releases`` beforehand. If that fails, nothing may be released."""
        if self._journal is not None:
            self._journal.add(releases)
        self.releases += releases

    def at_least(self, releases: int) -> None:
        """Raise the number of releases to a checkpoint's, unless the journal counted more."""
        if releases > self.releases:
            self.spend(releases - self.releases)

    def statement(self) -> str:
        """Describe the cost so far in one line."""
        p = self.privacy
        return (
            f"privacy: epsilon {epsilon(self.releases, p.noise, p.delta):.3g} at delta {p.delta:g} per client after {self.releases} "
            f"releases (noise multiplier {p.noise:g}, clips {p.clip:g} and {p.statistics_clip:g} for statistics; zCDP, no amplification)"
        )
