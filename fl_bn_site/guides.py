"""Fill in the pages and scripts of a kit, which are files in ``fl_bn_site/kit_files``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from string import Template

from fl_bn_site.folders import EXCHANGE_PORTS


def kit_file(name: str) -> str:
    """Return the text of the file ``name`` of ``kit_files``."""
    return files("fl_bn_site").joinpath("kit_files", name).read_text(encoding="utf-8")


INSTALL = kit_file("install.md").rstrip("\n")
"""The section on how to install fl-bn, which is part of both guides."""


def kit_readme(sites: Sequence[str], submitters: Sequence[str]) -> str:
    """Return the README of a kit, for the person who makes it. It has a row for each of ``sites`` and ``submitters``."""
    rows = [f"| `sites/{site}/` | the IT person of {site}, over a channel that keeps it secret | `site.key` |" for site in sites]
    rows += [f"| `submitters/{name}/` | {name}, who submits runs: no machine of the server | `submitter.key` |" for name in submitters]
    return Template(kit_file("kit.md")).substitute(rows="\n".join(rows))


def server_guide(fleet: int, exchange: int) -> str:
    """Return the guide for the person who runs the server.

    Args:
        fleet: The port to which SuperNodes connect.
        exchange: The first port of the layer-wise exchange (FedTAN, exact statistics).
    """
    last = exchange + EXCHANGE_PORTS - 1
    return Template(kit_file("server.md")).substitute(install=INSTALL, fleet=fleet, exchange=exchange, last_exchange=last)


def site_guide(site: str, fleet: str, exchange: str) -> str:
    """Return the guide for the person who runs a site.

    Args:
        site: The name of the site.
        fleet: The address to which SuperNodes connect, HOST:PORT.
        exchange: The first address of the layer-wise exchange (FedTAN, exact statistics), HOST:PORT.
    """
    more = EXCHANGE_PORTS - 1
    return Template(kit_file("site.md")).substitute(install=INSTALL, site=site, fleet=fleet, exchange=exchange, more_ports=more)
