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


def seat_of_newcomer(
    number: int, online: Collection[int], clients: int, given: Mapping[int, tuple[int, int]], served: Collection[int]
) -> int:
    """Return the number of a node that comes after the start.

    It gets the ``number`` that it says, if no node that is online has it. Else it gets the number of a node that is gone and said the same:
    it may be that one, restarted. Or it gets one that was given to nobody, where another's was given to a node that is online.

    Args:
        number: that it says.
        online: the numbers that nodes have.
        clients: how many numbers there are.
        given: the numbers that were given, and those that their nodes said, by node.
        served: numbers that some node has had since the start.
    """
    if number not in online:
        return number
    if gone := sorted(has for has, said in given.values() if said == number and has not in online):
        return gone[0]
    if number not in {has for has, _ in given.values()}:
        return number
    return min(set(range(clients)) - set(online) - set(served), default=number)
