"""Replace the part of a page between two marks."""

from __future__ import annotations

from fl_bn.app.config import ConfigError

END = "<!-- end -->"


def replaced(text: str, name: str, part: str) -> str:
    """Return a page with new text between the lines ``<!-- NAME -->`` and ``<!-- end -->``.

    Args:
        text: The text of the page.
        name: The name in the first mark.
        part: The new text between the marks.

    Raises:
        ConfigError: The page lacks the marks.
    """
    begin = f"<!-- {name} -->\n"
    before, mark, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    if not (mark and end):
        raise ConfigError(f"the page needs the lines {begin.strip()} and {END} around the part that this command writes")
    return before + begin + part + end + after
