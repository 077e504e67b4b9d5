"""Define the settings of secure aggregation (SecAgg+)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fl_bn.options import Options, option, refuse
from fl_bn.secure.privacy import SECURE, Privacy

MODULUS = 2**32  # the sums are computed modulo this number
FINEST, WIDEST = 1.0, 1e3  # limits of clipping ranges: below, variances are cut; beyond, an honest vector is rounded to 0
LEAST = 3  # the fewest clients in a sum: of two clients, each could compute the other's vector


secured = partial(option, used=SECURE)


@dataclass(frozen=True)
class SecureAggregation(Options):
    """Describe the settings of SecAgg+. For most fields see docs/config.md.

    Attributes:
        shares: a client shares masks with ``shares - 1`` others.
        privacy: clips, and noise to add before masking. None: no noise.

    Raises:
        ValueError: a value is out of range, or two do not fit together.
    """

    name: ClassVar[str] = "secure aggregation"
    prefix: ClassVar[str] = "secagg"

    shares: int = secured(
        0, "number of parts into which each client's secrets are split, odd; 0: one part per client of the cohort", f"0 or >= {LEAST}"
    )
    threshold: int = secured(
        0, "number of parts that recover a secret, more than half of them; 0: the smallest such number", ">= 0", hidden=True
    )
    clipping_range: float = secured(
        8.0,
        "values beyond this are cut off: in standard deviations for statistics, in their own units for weights",
        f"{FINEST:.0f}..{WIDEST:.0f}",
    )
    quantization_range: int = secured(22, "bits per value within that range", "4..30", hidden=True)
    privacy: Privacy | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shares:
            self.check(max(self.shares, LEAST))

    def shares_of(self, clients: int) -> int:
        """Return into how many parts secrets are divided, in a sum of ``clients``."""
        return min(self.shares or clients, clients)

    def threshold_of(self, clients: int) -> int:
        """Return how many parts recover a secret, in a sum of ``clients``."""
        return self.threshold or self.shares_of(clients) // 2 + 1

    def check(self, clients: int) -> None:
        """Check that the vectors of ``clients`` clients can be summed.

        Raises:
            ValueError: clients are too few, the sum would overflow, or an option
                does not fit.
        """
        shares, threshold, most = self.shares_of(clients), self.threshold_of(clients), (MODULUS - 1).bit_length() - clients.bit_length()
        fits = shares < 2 * threshold <= 2 * shares
        refuse(
            (clients < LEAST, f"secure aggregation needs at least {LEAST} clients in a sum, but got {clients}"),
            (clients << self.quantization_range >= MODULUS,
             f"the sum of {clients} vectors may overflow: take fewer clients, or SecureAggregation(quantization_range={most}) in Python"),
            (self.shares and self.shares % 2 == 0,
             f"secagg-shares must be 0 (one per client) or an odd number from {LEAST}, but got {self.shares}"),
            (not fits, f"threshold must be 0, or more than half of the {shares} shares and at most all, but got {threshold}"),
        )  # fmt: skip
