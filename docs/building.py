"""Hooks that mkdocs calls when it builds the site (``hooks`` in ``mkdocs.yml``).

Pages link to files of the repository, such as ``../examples/pure_torch.py``. These links work where the repository is
browsed. For the site, every linked file is copied to ``repository/PATH`` (Markdown and code become pages), and the
links are changed to the copies. A link to a missing file is left unchanged, so that mkdocs reports it.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from fl_bn.options import Option, Options, own_options

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
    """Apply ``change`` to the parts of ``text`` outside fenced blocks."""
    parts, end = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])


def target(link: str, source: str) -> str | None:
    """Return the file or folder of the repository that ``link`` in the file ``source`` leads to; None if it leads to
    neither.
    """
    if re.match(r"[a-z]+:", link):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if (REPOSITORY / path / "README.md").is_file():
        path += "/README.md"
    return path if not path.startswith("..") and (REPOSITORY / path).exists() else None


def home(path: str) -> str:
    """Return the site's address of ``path``, a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return COPIES + path + (".md" if Path(path).suffix in CODE or (REPOSITORY / path).is_dir() else "")


def source_of(uri: str) -> str:
    """Return the file of the repository from which the site's page ``uri`` is made."""
    path = uri.removeprefix(COPIES)
    return f"docs/{uri}" if path == uri else path.removesuffix(".md") if Path(path.removesuffix(".md")).suffix in CODE else path


def links(text: str, source: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to."""
    found: list[str] = []
    outside(text, lambda part: found.extend(LINK.findall(part)) or part)  # type: ignore[func-returns-value]
    for link in found:
        if path := target(link, source):
            yield path


def copied(config: MkDocsConfig, path: str) -> File:
    """Return the file or folder ``path`` of the repository as a file of the site; code, or a folder of code, becomes
    a page.
    """
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
    """Add to the site the files that its pages link to, and the files that these link to."""
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
    """Change links to files of the repository into links to their copies."""
    here = page.file.src_uri
    source = source_of(here)

    def led(match: re.Match[str]) -> str:
        path = target(match[0], source)
        return match[0] if path is None else posixpath.relpath(home(path), posixpath.dirname(here) or ".")

    return outside(markdown, lambda part: LINK.sub(led, part))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link every picture to its full size, for small screens."""
    return PICTURE.sub(r'<a href="\g<address>">\g<0></a>', html)


class Docstrings(griffe.Extension):
    """Changes docstrings for the site.

    Examples become code blocks (``>>>`` would be a quotation in Markdown), and names of pages become links. The
    options of a method or an objective are described in one place, in the call of ``option``. From there the site
    takes a table of the options, and their defaults for the signature.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change one docstring and, for the constructor of an object with options, the signature."""
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if isinstance(obj, griffe.Function) and any(str(decorator.value).startswith("takes(") for decorator in obj.decorators):
            constructor = getattr(importlib.import_module(obj.module.path), obj.name)
            options = own_options(constructor.options) if hasattr(constructor, "options") else {}
            obj.parameters = griffe.Parameters(*_parameters(constructor, options))
            text = _with_section(text, "Args", options)
        elif isinstance(obj, griffe.Class) and (options := _own_options(obj)):
            for name, spec in options.items():
                obj.parameters[name].default = repr(spec.neutral)
            text = _with_section(text, "Attributes", options)
        text = DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
        obj.docstring.value = outside(text, lambda part: NAMED.sub(r"[\2](../\1/\2.md)", part))


def _own_options(obj: griffe.Class) -> dict[str, Option]:
    """Return the options among the class's own fields."""
    if not obj.bases:
        return {}
    kind = getattr(importlib.import_module(obj.module.path), obj.name, None)
    if not (isinstance(kind, type) and issubclass(kind, Options)):
        return {}
    return {name: spec for name, spec in own_options(kind).items() if name in obj.members}


def _parameters(constructor: Any, options: Mapping[str, Option]) -> Iterator[griffe.Parameter]:
    """Yield the parameters of a constructor, with types and defaults."""
    for name, parameter in inspect.signature(constructor).parameters.items():
        note = parameter.annotation
        text = note if isinstance(note, str) else inspect.formatannotation(note)
        yield griffe.Parameter(name, annotation=text, kind=griffe.ParameterKind.positional_or_keyword, default=repr(options[name].neutral))


def _with_section(text: str, title: str, options: Mapping[str, Option]) -> str:
    """Insert a section that describes the options before the first section of a docstring."""
    section = [f"{title}:", *(f"    {name}: {_meaning(spec)}" for name, spec in options.items())]
    parts = re.split(r"^(?=(?:Returns|Raises|References):$)", text, maxsplit=1, flags=re.MULTILINE)
    return "\n\n".join([parts[0].rstrip(), "\n".join(section), *parts[1:]])


def _meaning(spec: Option) -> str:
    """Describe an option: its meaning, its values, and the meaning of None."""
    values = spec.values if isinstance(spec.values, str) else ", ".join(map(str, spec.values))
    sentences = [spec.help, f"Values: {values}" if values else ""]
    return " ".join(f"{sentence}." for sentence in sentences if sentence)
