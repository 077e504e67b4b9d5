"""Sizes that clients state and the server cannot see: each statement is compared with those of the others.

How many activations a sample has in a layer, nobody but the client knows: inputs may differ in size from client to client (pictures, texts,
graphs), and a layer may run several times. What weighs a client's statistics is such a number times its samples, so one false number would
make the client's mean the cohort's. Honest numbers differ by the sizes of the inputs alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import median_high

FAR = 64.0  # times the median client's: pictures of eight times the height and width. No larger claim is believed
FEWEST = 3  # claims that tell who is far from the others: of two, nobody knows which is false


def most_believed(claims: Collection[float]) -> float:
    """Return the largest number that is believed of any client, by the ``claims`` of all; infinity where they are too few to tell.

    One false claim, however large or small, does not move the limit out of the honest range: the median stays among the others' claims.
    """
    return FAR * median_high(claims) if len(claims) >= FEWEST else math.inf
