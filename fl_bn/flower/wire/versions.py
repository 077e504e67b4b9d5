"""Compare versions: a server and a client with different versions of fl-bn refuse each other, and name both versions.

Versions are compared when a client introduces itself, and with every later message. A site may return with
another version in the middle of a run. The version is that of the installed package. In a deployment Flower sends
the server's app to the sites. But a site's SuperNode, commands and libraries come from its own installed package.
"""

from __future__ import annotations

from functools import cache

from flwr.app import ConfigRecord, Message, RecordDict

from fl_bn.federation.fields import Values
from fl_bn.flower.wire.messages import HELLO, TO_GREET
from fl_bn.support.extras import version_of
from fl_bn.support.wire import printable

ADVICE = 'install the server\'s version at every site (docs, "Upgrade the server and its sites")'


class OtherVersion(RuntimeError):
    """Signal that the other side has another version of fl-bn."""


@cache
def here() -> str:
    """Return the version of fl-bn that is installed here. It is read once per process, since reading takes milliseconds."""
    return version_of("fl-bn")


def greeting() -> RecordDict:
    """Return the content of the message that asks a client to introduce itself."""
    return RecordDict({TO_GREET.name: ConfigRecord({"version": here()})})


def check_server(message: Message) -> None:
    """Check at the client that the server has the same version of fl-bn.

    Raises:
        OtherVersion: the versions differ. The error becomes the client's reply.
    """
    content = message.content
    theirs = str(TO_GREET.of_configs(content)["version"]) if TO_GREET.name in content else ""
    if theirs not in ("", here()):
        raise OtherVersion(f"this site has fl-bn {here()}, and the server {printable(theirs)}: {ADVICE}")


def introduction_of(content: RecordDict) -> Values:
    """Read a client's introduction, at the server.

    Raises:
        WireError: there is no introduction, or one of its fields is not as expected.
    """
    return HELLO.of_configs(content)


def client_differs(theirs: str) -> str:
    """Return, at the server, why a client with the version ``theirs`` cannot take part. Empty if it can."""
    if theirs == here():
        return ""
    version = f"fl-bn {printable(theirs)}" if theirs else "an earlier fl-bn, which names no version"
    return f"it has {version}, and the server {here()}: {ADVICE}"
