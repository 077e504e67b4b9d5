"""Which number a node has in an app of one's own, where several nodes say the same one: clients are nodes there.

A number is a node's own word, and the server uses it for names and order alone: which data a client has, it decides by itself. So where two
nodes say one number and another number is left, both take part. Who lied gets the number that it did not say, which nobody else says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def seated(said: Mapping[int, int], clients: int) -> dict[int, int]:
    """Return the numbers of those nodes that cannot have the number that they said, by node; none where numbers are fewer than nodes.

    Of several nodes that say one number, the smallest node id has it: Flower draws these at random. The others get, in order, the smallest
    numbers that nobody says.

    Args:
        said: the numbers, by node.
        clients: how many numbers there are.
    """
    if len(said) > clients:
        return {}
    first: dict[int, int] = {}
    for node in sorted(said):
        first.setdefault(said[node], node)
    free = iter(sorted(set(range(clients)) - set(said.values())))
    return {node: next(free) for node in sorted(said) if first[said[node]] != node}


def seat_of_newcomer(number: int, said: Mapping[int, int], clients: int, given: Mapping[int, int], served: Collection[int]) -> int:
    """Return the number of a node that comes after the start.

    Where the ``number`` that it says was given to a node that said another one, it gets one that nobody says or has had, if there is one.

    Args:
        number: that it says.
        said: the numbers that nodes say, by node.
        clients: how many numbers there are.
        given: numbers of ``seated`` at the start, by node.
        served: numbers that some node has had since the start.
    """
    if number not in {given[node] for node in said if node in given}:
        return number
    return min(set(range(clients)) - set(said.values()) - set(served), default=number)
