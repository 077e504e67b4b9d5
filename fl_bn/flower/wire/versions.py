"""Let server and clients of different versions of fl-bn refuse each other, with an error that names both versions.

Versions are compared when a client introduces itself, and with every later message: a site may come back with
another version in the middle of a round. The version is that of the installed package. In a deployment Flower
sends the server's own code to the sites, so that code does not show what a site has installed: its SuperNode,
its libraries, its commands.
"""

from __future__ import annotations

from functools import cache

from flwr.app import ConfigRecord, Message, RecordDict

from fl_bn.flower.wire.messages import TO_GREET
from fl_bn.support.extras import version_of
from fl_bn.support.wire import printable

ADVICE = 'install the server\'s version at every site (docs, "Upgrade the server and its sites")'


class OtherVersion(RuntimeError):
    """Report that the other side runs another version of fl-bn."""


@cache
def here() -> str:
    """Return the version of fl-bn that is installed here. Reading it takes milliseconds, so that happens once per process."""
    return version_of("fl-bn")


def greeting() -> RecordDict:
    """Return the content of the message that asks a client to introduce itself."""
    return RecordDict({"config": ConfigRecord({"version": here()})})


def check_server(message: Message) -> None:
    """Check the server's version, at the client.

    Raises:
        OtherVersion: it differs. This becomes the reply.
    """
    theirs = str(TO_GREET.of_configs(message.content)["version"]) if "config" in message.content else ""
    if theirs not in ("", here()):
        raise OtherVersion(f"this site has fl-bn {here()}, and the server {printable(theirs)}: {ADVICE}")


def client_differs(theirs: str) -> str:
    """Return why a client of the version ``theirs`` cannot take part, at the server; empty if it can."""
    if theirs == here():
        return ""
    version = f"fl-bn {printable(theirs)}" if theirs else "an earlier fl-bn, which names no version"
    return f"it has {version}, and the server {here()}: {ADVICE}"
