"""Build the package; make the links of README.md absolute, because the package index shows it without the repository.

The links lead to files below ``Repository`` of ``[project.urls]`` in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\]\([^)]*\))*)\]\((?!#)([^)\s:]+)\)")


def absolute(text: str, repository: str) -> str:
    """Return ``text`` with its relative links changed to links to the newest files in ``repository``.

    Links to pictures lead to the raw files.
    """

    def led(found: re.Match[str]) -> str:
        return f"{found[1]}[{LINK.sub(led, found[2])}]({repository}/{'raw' if found[1] else 'blob'}/HEAD/{found[3]})"

    return LINK.sub(led, text)


if __name__ == "__main__":
    urls = tomllib.loads((HERE / "pyproject.toml").read_text())["project"].get("urls", {})
    readme = (HERE / "README.md").read_text()
    readme = absolute(readme, urls["Repository"].rstrip("/")) if "Repository" in urls else readme
    setup(long_description=readme, long_description_content_type="text/markdown")
