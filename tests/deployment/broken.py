"""Make deployments that do not work, each broken in one way, from one that works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.deployment import tls_servers

SITE = Path("sites") / "A"


@dataclass(frozen=True)
class Setup:
    """Describe a deployment: a kit in the folder ``kit``, whose server accepts TLS connections.

    ``pythonpath`` is a folder of packages that take precedence over the installed ones. ``stack`` closes what the deployment opened.
    """

    kit: Path
    stack: ExitStack
    pythonpath: Path

    @property
    def site(self) -> Path:
        return self.kit / SITE

    def write_line(self, name: str, value: object) -> None:
        tls_servers.write_line(self.site / "site.toml", name, value)


def expired(setup: Setup) -> None:
    tls_servers.reissue(setup.kit, ["localhost"], begins=-400, ends=-2)


def wrong_name(setup: Setup) -> None:
    tls_servers.reissue(setup.kit, ["fl.example.org", "192.0.2.7"])


def no_data(setup: Setup) -> None:
    setup.write_line("data-path", "elsewhere/site.npz")


def port_taken(setup: Setup) -> None:
    taken = setup.stack.enter_context(tls_servers.listen())
    setup.write_line("clientappio", f"127.0.0.1:{tls_servers.port_of(taken)}")


def other_version(setup: Setup) -> None:
    """Add the metadata of another version of Flower to ``pythonpath``, as if somebody had upgraded Flower."""
    folder = setup.pythonpath / "flwr-1.31.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flwr\nVersion: 1.31.0\n")


def one_sample(setup: Setup) -> None:
    write_data(setup.site / "site.npz", train=1)


# What is broken, how, the check that finds it, and words of its answer.
BROKEN: dict[str, tuple[Callable[[Setup], None], str, str]] = {
    "expired certificate": (expired, "superlink TLS", "expired"),
    "wrong host name": (wrong_name, "superlink TLS", "Hostname mismatch"),
    "missing data": (no_data, "data", "elsewhere/site.npz"),
    "port taken": (port_taken, "clientappio", "no program can listen on"),
    "version mismatch": (other_version, "packages", "flwr is 1.31.0, but fl-bn needs <1.26,>=1.25"),
    "batch of one": (one_sample, "batches", "BatchNorm can train on"),
}


@contextmanager
def made(folder: Path, breaking: Callable[[Setup], None] = lambda setup: None) -> Iterator[Setup]:
    """Make a working deployment in ``folder``, let ``breaking`` break it, and start its server.

    The deployment has a kit, a site with data, and a server that accepts TLS connections.
    """
    with ExitStack() as stack:
        listening = stack.enter_context(tls_servers.listen())
        kit = tls_servers.make_kit(folder / "kit", tls_servers.port_of(listening))
        setup = Setup(kit, stack, folder / "packages")
        write_data(setup.site / "site.npz", train=24)
        setup.write_line("dataset", "npz")
        setup.write_line("data-path", "site.npz")
        breaking(setup)
        stack.enter_context(tls_servers.serving(listening, kit / "server"))
        yield setup


def write_data(file: Path, train: int) -> None:
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", train), ("test", 4)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (count, 20, 20, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % 4
    np.savez(file, **arrays)  # type: ignore[arg-type]
