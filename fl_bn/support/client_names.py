"""Name clients and Flower's nodes in logs, errors and records."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fl_bn.support.names import names_of

SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # a site's name, which becomes the name of files and folders


@dataclass(frozen=True)
class ClientNames:
    """Hold the names of clients and nodes, which are empty in a simulation.

    Attributes:
        names: the sites' names, by client index.
        nodes: Flower's node ids, by client index.
        registered: Returns node id -> name of the site that has this node now. If a
            site's key was renewed during the run, its node is not that in
            ``nodes``.
    """

    names: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    registered: Callable[[], Mapping[int, str]] = dict

    def site(self, index: int) -> str:
        """Return the name of the site of client ``index``, if it has one."""
        return self.names[index] if 0 <= index < len(self.names) else ""

    def client(self, index: int) -> str:
        """Return the name of a client's site, or its number, for messages.

        >>> ClientNames().client(2), ClientNames(("east", "west")).client(1)
        ('client 2', 'site west')
        """
        return f"site {name}" if (name := self.site(index)) else f"client {index}"

    def clients(self, indices: Iterable[int]) -> str:
        """Return the names of several clients for messages.

        >>> ClientNames().clients([0, 2]), ClientNames(("east", "west")).clients([0, 1])
        ('clients 0, 2', 'sites east, west')
        """
        some = list(indices)
        named = bool(some) and all(map(self.site, some))
        what = f"{'site' if named else 'client'}{'s' * (len(some) != 1)}"
        return f"{what} {', '.join(self.site(index) if named else str(index) for index in some)}"

    def node(self, node: int) -> str:
        """Return the name of a Flower node's site, or its id, for messages.

        >>> ClientNames(("east", "west"), (17, 4)).node(4), ClientNames().node(4)
        ('site west', 'node 4')
        """
        name = self.site(self.nodes.index(node)) if node in self.nodes else self.registered().get(node, "")
        return f"site {name}" if name else f"node {node}"

    def client_of(self, node: int) -> int | None:
        """Return the index of the client that has this node now or had it at the start, if any.

        >>> renewed = ClientNames(("east", "west"), (17, 4), lambda: {17: "east", 9: "west", 5: "north"})
        >>> [renewed.client_of(node) for node in (17, 4, 9, 5)]
        [0, 1, 1, None]
        """
        if node in self.nodes:
            return self.nodes.index(node)
        name = self.registered().get(node, "")
        return self.names.index(name) if name in self.names else None


UNNAMED = ClientNames()


def nodes_of(text: str) -> tuple[int, ...]:
    """Return Flower's node ids in ``text``: (17, 4) for ``"17, 4"``, and () for an empty text.

    Another text, or one that names a node twice, raises ``ValueError``.
    """
    names = names_of(text)
    nodes = tuple(int(name) for name in names if re.fullmatch(r"\d{1,20}", name, re.ASCII))
    if len(set(nodes)) < len(names):
        raise ValueError(f"expected Flower's node ids, whole numbers separated by commas, each node once, but got {text!r}")
    return nodes


def sites_of(text: str) -> tuple[str, ...]:
    """Return the names of sites in ``text``: ("east", "west") for ``"east, west"``.

    Another text, or one with a name twice, in upper or lower case, raises
    ``ValueError``.
    """
    names = names_of(text)
    if not all(map(SITE.fullmatch, names)) or len({name.casefold() for name in names}) < len(names):
        raise ValueError(f"expected different names of sites (letters, digits, '.', '_' and '-'), separated by commas, but got {text!r}")
    return names
