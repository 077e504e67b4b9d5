"""Sizes that clients state and the server cannot check: each statement is compared with the others.

Only the client knows how many activations a sample has in a layer. Inputs may differ in size from client to
client (pictures, texts, graphs), and a layer may run several times. This number times the number of samples
is the weight of a client's statistics, so one false number would replace the cohort's mean by the client's.
Honest numbers differ only by the sizes of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import median_high

FAR = 64.0  # largest accepted claim, in units of the median client's: pictures of eight times the height and width
FEWEST = 3  # fewest claims for a comparison: of two different ones, either may be false


def most_believed(claims: Collection[float]) -> float:
    """Return the largest claim that is accepted, given the ``claims`` of all clients.

    One false claim, however large or small, keeps the limit in the honest range, because the median stays
    among the others' claims.

    Returns:
        The limit; infinity if there are too few claims to compare.
    """
    return FAR * median_high(claims) if len(claims) >= FEWEST else math.inf
