"""Define ``fl-bn kit submitter``, for people who sign runs, and ``fl-bn kit trust``, for sites that trust them.

Each command imports its modules only when it runs, since imports of ``cryptography`` and Flower take time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fl_bn.cli.refusal import refused


def submitter(
    name: Annotated[str, typer.Argument(metavar="NAME", help="your name: letters, digits, '.', '_' and '-'")],
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="where the two files are written")] = Path(),
) -> None:
    """Make the key with which you sign runs: submitter.key, which is yours alone, and submitter.pub for the sites."""
    from fl_bn_site.submitters import PRIVATE, PUBLIC, write_submitter_key

    try:
        made = write_submitter_key(output, name)
    except (OSError, ValueError) as error:
        raise refused(error) from error
    typer.echo(f"{output / PRIVATE}: yours alone, and never on the server's machine")
    typer.echo(f"{output / PUBLIC}: send it to every site, and tell them its fingerprint")
    typer.echo(str(made))


def trust(
    site: Annotated[Path, typer.Argument(metavar="SITE", help="the folder of the site: kit/sites/NAME")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="the submitter's name")],
    public_key: Annotated[Path, typer.Argument(metavar="FILE", help="the submitter's submitter.pub")],
) -> None:
    """Let the runs that a submitter signs take place at this site, from the next message on."""
    from fl_bn_site.folders import SiteFolder
    from fl_bn_site.submitters import public_key as read
    from fl_bn_site.submitters import trust as let_in

    try:
        folder, whom = SiteFolder.read(site), read(name, public_key)
        let_in(folder, whom)
    except (OSError, ValueError) as error:
        raise refused(error) from error
    typer.echo(f"{folder.path}: runs of {whom} may take place here. Ask {name} whether this fingerprint is right")
