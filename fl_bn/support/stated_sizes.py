"""Limit the numbers of activations that clients report and the server cannot check, by comparing the clients.

Only the client knows how many activations a sample has in a layer. Inputs may differ in size between clients
(pictures, texts, graphs), and a layer may run several times. This number times the number of samples is the weight of
a client's statistics. So by one false number, a client could make the cohort's mean equal to its own mean. Honest
numbers differ only by the sizes of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import median_high

FAR = 64.0  # the largest accepted number, in multiples of the median client's: 8 times the height and width of a picture
FEWEST = 3  # the fewest numbers to compare: of two different ones, either may be false


def most_believed(claims: Collection[float]) -> float:
    """Return the limit above which a reported number is not accepted, given the numbers of all clients.

    The limit is ``FAR`` times the median of the numbers. One false number, however large or small, cannot move
    the median out of the range of the other clients' numbers.

    Args:
        claims: the reported numbers, one per client.

    Returns:
        The limit. Infinity if there are too few numbers to compare.
    """
    return FAR * median_high(claims) if len(claims) >= FEWEST else math.inf
