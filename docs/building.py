"""What mkdocs does beside its own work when it builds the site (``mkdocs.yml``, ``hooks``).

Pages link to files of the repository: ``../examples/pure_torch.py``. Those links work where the repository is browsed. The site has a
copy of every such file at ``repository/PATH``, a page for Markdown and code, and the links lead there. A link to a file that does not
exist is left as it is, and mkdocs refuses it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parent.parent
COPIES = "repository/"
FOLDERS = ("benchmarks", "deploy", "examples", "experiments")
ALWAYS = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", *(f"{folder}/README.md" for folder in FOLDERS))
CODE = {".py": "python", ".toml": "toml"}
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
PICTURE = re.compile(r'<img [^>]*?src="(?P<address>[^"]+)"[^>]*>')
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"docs/(\w[\w-]*)/([\w-]+)\.md")
DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


def outside(text: str, change: Callable[[str], str]) -> str:
    """``text`` with ``change`` applied to what is not in a fenced block."""
    parts, end = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])


def target(link: str, source: str) -> str | None:
    """The file or folder of the repository that ``link`` in its file ``source`` leads to; None where that is neither."""
    if re.match(r"[a-z]+:", link):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if (REPOSITORY / path / "README.md").is_file():
        path += "/README.md"
    return path if not path.startswith("..") and (REPOSITORY / path).exists() else None


def home(path: str) -> str:
    """Where the site has the file or folder ``path`` of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return COPIES + path + (".md" if Path(path).suffix in CODE or (REPOSITORY / path).is_dir() else "")


def source_of(uri: str) -> str:
    """The file of the repository that the site's page ``uri`` is made from."""
    path = uri.removeprefix(COPIES)
    return f"docs/{uri}" if path == uri else path.removesuffix(".md") if Path(path.removesuffix(".md")).suffix in CODE else path


def links(text: str, source: str) -> Iterator[str]:
    """The files of the repository that a page links to."""
    found: list[str] = []
    outside(text, lambda part: found.extend(LINK.findall(part)) or part)  # type: ignore[func-returns-value]
    for link in found:
        if path := target(link, source):
            yield path


def copied(config: MkDocsConfig, path: str) -> File:
    """The file or folder ``path`` of the repository as a file of the site: code, and a folder of code, as a page."""
    file = REPOSITORY / path
    if file.is_dir():
        shown = [f"## {code.relative_to(file)}\n\n{_fenced(code)}" for code in sorted(file.rglob("*")) if code.suffix in CODE]
        return File.generated(config, home(path), content="\n\n".join([f"# {path}", *shown]))
    if file.suffix in CODE:
        return File.generated(config, home(path), content=f"# {path}\n\n{_fenced(file)}")
    return File.generated(config, home(path), abs_src_path=str(file))


def _fenced(code: Path) -> str:
    return f"```{CODE[code.suffix]}\n{code.read_text()}```\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what the pages link to, and what that links to."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting, seen = [*pages, *ALWAYS], set[str]()
    while waiting:
        if (path := waiting.pop()) in seen:
            continue
        seen.add(path)
        if not path.startswith("docs/"):
            files.append(copied(config, path))
        if path.endswith(".md"):
            waiting += links((REPOSITORY / path).read_text(), path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files of the repository to their copies."""
    here = page.file.src_uri
    source = source_of(here)

    def led(match: re.Match[str]) -> str:
        path = target(match[0], source)
        return match[0] if path is None else posixpath.relpath(home(path), posixpath.dirname(here) or ".")

    return outside(markdown, lambda part: LINK.sub(led, part))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads from every picture to itself in full size, for small screens."""
    return PICTURE.sub(r'<a href="\g<address>">\g<0></a>', html)


DEFAULT_AT = dict.fromkeys(("option", "over_grpc", "secured", "noisy_option", "ruled"), 0) | {"shared": 2}
"""By the name of a function that declares an option: which of its arguments is the constructor's default."""


class Docstrings(griffe.Extension):
    """Docstrings show their examples as code (``>>>`` would be a quotation in Markdown), and link to the pages that they name."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
            obj.docstring.value = outside(text, lambda part: NAMED.sub(r"[\2](../\1/\2.md)", part))

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Show the default of an option as the constructor has it, without the option's range and meaning."""
        value = attr.value
        if not isinstance(value, griffe.ExprCall):
            return
        place = DEFAULT_AT.get(str(value.function).rpartition(".")[2])
        if place is not None:
            default = value.arguments[place]
            attr.value = None if str(default) == "REQUIRED" else default
