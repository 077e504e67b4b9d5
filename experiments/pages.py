"""Write the page of an experiment that is a program, and the page that links to all experiments."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from fl_bn.support import durable

PAGE = "report.html"  # as fl_bn.app.report calls the page of a sweep


def write_program_page(folder: Path, source: Path) -> Path:
    """Write the page of a program: its pictures, links to its tables, and the file of the experiment.

    Args:
        folder: The folder with the results of the program.
        source: The file of the experiment.
    """
    text = source.read_text(encoding="utf-8")
    title = escape(tomllib.loads(text)["title"])
    parts = [f"<!DOCTYPE html>\n<html lang=en><meta charset=utf-8><title>{title}</title>\n<h1>{title}</h1>"]
    parts += [f'<p><img src="{quote(file.name)}" alt="{escape(file.stem)}"></p>' for file in sorted(folder.glob("*.png"))]
    parts += [f'<p><a href="{quote(file.name)}">{escape(file.name)}</a></p>' for file in sorted(folder.glob("*.csv"))]
    parts.append(f"<pre>{escape(text)}</pre></html>")
    return _write(folder / PAGE, parts)


def write_index(folders: Sequence[Path], path: Path) -> Path:
    """Write a page with links to the reports in ``folders``, which are beside the page."""
    links = [f'<li><a href="{quote(folder.name)}/{PAGE}">{escape(folder.name)}</a></li>' for folder in folders]
    head = "<!DOCTYPE html>\n<html lang=en><meta charset=utf-8><title>Experiments</title>\n<h1>Experiments</h1>"
    return _write(path, [head, "<ul>", *links, "</ul></html>"])


def _write(path: Path, parts: Sequence[str]) -> Path:
    durable.write(path, ("\n".join(parts) + "\n").encode(), mode=0o666)
    return path
