"""How a command says no: one sentence on standard error, and an exit code."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from fl_bn.support.extras import EXTRAS, sentence
from fl_bn.support.locks import Unsupported


def refused(error: Exception, code: int = 2) -> typer.Exit:
    """To be raised. What ``error`` says is printed as it is: brackets in it are no markup."""
    Console(stderr=True).print(f"[red]{type(error).__name__}[/red]: {escape(str(error))}", highlight=False, soft_wrap=True)
    return typer.Exit(code)


class Commands(TyperGroup):
    """Commands that need a package of an extra which is not installed, or another operating system, say so, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            absent = (error.name or "").partition(".")[0]
            if absent not in EXTRAS:
                raise
            told = ModuleNotFoundError(sentence("this command", [absent]))
            raise refused(told) from error
        except Unsupported as error:
            raise refused(error) from error
