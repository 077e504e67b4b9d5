"""End a command that cannot be carried out, with one sentence and an exit code."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from fl_bn.support.durable import FULL, Unsupported
from fl_bn.support.extras import EXTRAS, NotInstalled, sentence
from fl_bn.support.names import escaped


def refused(error: Exception, code: int = 2) -> typer.Exit:
    """Print an error on standard error, without markup, and return the command's exit."""
    Console(stderr=True).print(f"[red]{type(error).__name__}[/red]: {escape(escaped(str(error)))}", highlight=False, soft_wrap=True)
    return typer.Exit(code)


class Commands(TyperGroup):
    """Run commands. If an extra is missing, the system unsupported, or the disk full, print one sentence."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the user has typed, or raise ``typer.Exit``."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            absent = (error.name or "").partition(".")[0]
            if absent not in EXTRAS:
                raise
            raise refused(ModuleNotFoundError(sentence("this command", [absent]))) from error
        except (NotInstalled, Unsupported, OSError) as error:
            if isinstance(error, OSError) and error.errno not in FULL:
                raise
            raise refused(error) from error
