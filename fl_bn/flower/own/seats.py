"""Choose the number of each node in an app of your own, where several nodes may claim the same number.

In such an app, each client is a node, and each node claims its number itself. The server uses the numbers only for
names and order, since each node chooses its own data. So if two nodes claim the same number, and another number is
free, both nodes take part. One of them gets a number that no other node claims.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def seated(claims: Mapping[int, int], clients: int) -> dict[int, int]:
    """Return node -> new number, for each node whose claimed number belongs to another node.

    Of several nodes that claim one number, the node with the smallest id gets it, since Flower draws these ids at
    random. The others, in the order of their ids, get the smallest numbers that nobody claims. The result is empty if
    there are more nodes than numbers.

    Args:
        claims: the claimed number of each node.
        clients: how many numbers there are.
    """
    if len(claims) > clients:
        return {}
    first: dict[int, int] = {}
    for node in sorted(claims):
        first.setdefault(claims[node], node)
    free = iter(sorted(set(range(clients)) - set(claims.values())))
    return {node: next(free) for node in sorted(claims) if first[claims[node]] != node}


def seat_of_newcomer(
    number: int, online: Collection[int], clients: int, given: Mapping[int, tuple[int, int]], served: Collection[int]
) -> int:
    """Return the number of a node that connects after the start and claims ``number``.

    The first case that applies decides:

    * No online node has ``number``: the new node gets it.
    * The server gave another number to a node that claimed ``number`` and is offline now: the new node gets that other
      number, since it may be the same client after a restart.
    * The server gave ``number`` to a node that claimed another one: the new node gets the smallest number that no node
      has had since the start. If there is none, it gets ``number``.
    * Otherwise it gets ``number``, and two nodes claim this number.

    Args:
        number: the number that the node claims.
        online: the numbers of the nodes that are online.
        clients: how many numbers there are.
        given: node -> the number that the server gave it, and the number that it claimed.
        served: the numbers that some node has had since the start.
    """
    if number not in online:
        return number
    if offline := sorted(seat for seat, claim in given.values() if claim == number and seat not in online):
        return offline[0]
    if number not in {seat for seat, _ in given.values()}:
        return number
    return min(set(range(clients)) - set(online) - set(served), default=number)
