"""Parts of a page that a command writes: between two marks."""

from __future__ import annotations

from fl_bn.run.config import ConfigError

END = "<!-- end -->"


def replaced(text: str, name: str, part: str) -> str:
    """Return a page's ``text`` with ``part`` between the lines ``<!-- name -->`` and ``<!-- end -->``.

    Raises:
        ConfigError: the page lacks the marks.
    """
    begin = f"<!-- {name} -->\n"
    before, found, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise ConfigError(f"the page needs the lines {begin.strip()} and {END} around what is written there")
    return before + begin + part + end + after
