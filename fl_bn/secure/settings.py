"""Parameters of secure aggregation, as a value: who can be summed, how finely, and what must hold for it to hide anything."""

from __future__ import annotations

from dataclasses import dataclass

from fl_bn.secure.privacy import Privacy

MODULUS = 2**32  # of the sums
FINEST, WIDEST = 1e-6, 1e3  # of clipping ranges: a wider one would round an honest client's vector away
LEAST = 3  # clients: with two, each knows the other's share of the sum


@dataclass(frozen=True)
class SecureAggregation:
    """Parameters of SecAgg+.

    ``shares`` of each client's secrets, odd or 0 for one per client of the cohort (a client is masked against ``shares - 1`` others);
    ``threshold`` of them recover a secret, 0 for more than half, which is the fewest allowed. ``clipping_range``: values beyond it are cut
    off, in standard deviations for statistics, in their own units for weights; ``quantization_range``: bits per value in between.
    ``privacy``: clips, and noise that the clients add before they mask.
    """

    shares: int = 0
    threshold: int = 0
    clipping_range: float = 8.0
    quantization_range: int = 22
    privacy: Privacy | None = None

    def __post_init__(self) -> None:
        if self.shares and (self.shares < LEAST or self.shares % 2 == 0):
            raise ValueError(f"secagg-shares must be 0 (one per client) or an odd number from {LEAST}, but got {self.shares}")
        if self.threshold < 0 or (self.shares and self.threshold and not self.shares < 2 * self.threshold <= 2 * self.shares):
            raise ValueError(
                f"secagg-threshold must be 0 or more than half of the {self.shares or 'cohort'} shares, but got {self.threshold}"
            )
        if not FINEST <= self.clipping_range <= WIDEST:
            raise ValueError(f"secagg-clipping-range must be a number from {FINEST} to {WIDEST:.0f}, but got {self.clipping_range}")
        if not 4 <= self.quantization_range <= 30:
            raise ValueError(f"secagg-quantization-range must be 4..30 bits, but got {self.quantization_range}")

    def shares_of(self, clients: int) -> int:
        return min(self.shares or clients, clients)

    def threshold_of(self, clients: int) -> int:
        return self.threshold or self.shares_of(clients) // 2 + 1

    def check(self, clients: int) -> None:
        """Raises ValueError where ``clients`` cannot be summed."""
        if clients < LEAST:
            raise ValueError(
                f"secure aggregation needs at least {LEAST} clients in a sum, but got {clients}: with two, each knows the other"
            )
        if clients * 2**self.quantization_range >= MODULUS:
            most = (MODULUS - 1).bit_length() - clients.bit_length()
            raise ValueError(
                f"{clients} clients of {self.quantization_range} bits overflow 32 bits: set secagg-quantization-range to {most}"
            )
        shares, threshold = self.shares_of(clients), self.threshold_of(clients)
        if not shares < 2 * threshold <= 2 * shares:
            raise ValueError(f"secagg-threshold must be more than half of the {shares} shares and at most all, but got {threshold}")
