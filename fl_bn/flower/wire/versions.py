"""Server and clients of different versions of fl-bn refuse each other, when a client introduces itself and with every message after
that, since a site may come back with another version in the midst of a round; either names both versions.

A version is that of the installed package. In a deployment Flower sends the server's own code to the sites, so the code says nothing of
what a site has installed: its SuperNode, its libraries, its commands.
"""

from __future__ import annotations

from functools import cache

from flwr.app import ConfigRecord, Message, RecordDict

from fl_bn.flower.wire.messages import TO_GREET
from fl_bn.support.extras import version_of
from fl_bn.support.wire import printable

ADVICE = 'install the server\'s version at every site (docs, "Upgrade the server and its sites")'


class OtherVersion(RuntimeError):
    """The other side runs another version of fl-bn."""


@cache
def here() -> str:
    """The version of fl-bn that is installed here: read once per process, since to read it takes milliseconds."""
    return version_of("fl-bn")


def greeting() -> RecordDict:
    """What the server sends to a client that is to introduce itself."""
    return RecordDict({"config": ConfigRecord({"version": here()})})


def check_server(message: Message) -> None:
    """At the client: refuse a server of another version. Raises OtherVersion, which becomes the reply."""
    theirs = str(TO_GREET.of_configs(message.content)["version"]) if "config" in message.content else ""
    if theirs not in ("", here()):
        raise OtherVersion(f"this site has fl-bn {here()}, and the server {printable(theirs)}: {ADVICE}")


def client_differs(theirs: str) -> str:
    """At the server: why a client of the version ``theirs`` cannot take part; empty where it can."""
    if theirs == here():
        return ""
    version = f"fl-bn {printable(theirs)}" if theirs else "an earlier fl-bn, which names no version"
    return f"it has {version}, and the server {here()}: {ADVICE}"
