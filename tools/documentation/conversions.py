"""Print the lines of ``examples/flower_apps`` that change when fl-bn is put in, for docs/start/flower-apps.md.

python -m tools.documentation.conversions
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

APPS = Path(__file__).parents[2] / "examples" / "flower_apps"
HEAD = """| app | API | method | lines added | lines taken away |
|---|---|---|---:|---:|"""


@dataclass(frozen=True)
class App:
    """Describe a converted app: its name, the API that it uses, and the method by which it trains after the conversion."""

    name: str
    api: str
    method: str


CONVERTED = (
    App("quickstart-pytorch", "messages", "fbn"),
    App("advanced-pytorch", "messages", "fbn"),
    App("quickstart-monai", "messages", "fixbn"),
    App("fedbn", "`NumPyClient`", "fedbn"),
    App("niid_bench", "`NumPyClient`", "hbn"),
)


def files(name: str) -> list[Path]:
    """Return the paths, inside the app, of all files that the app has before or after its conversion."""
    sides = [APPS / name / side for side in ("before", "after")]
    return sorted({path.relative_to(side) for side in sides for path in side.rglob("*") if path.suffix in (".py", ".toml")})


def changed(name: str, file: Path) -> list[str]:
    """Return the lines of one file that the conversion removes (``-``) or adds (``+``), as ``git diff -w`` shows them."""
    texts = [(APPS / name / side / file).read_text().splitlines() for side in ("before", "after")]
    plain = [[line.strip() for line in text] for text in texts]
    found = list[str]()
    for kind, i, j, k, m in difflib.SequenceMatcher(None, *plain, autojunk=False).get_opcodes():
        if kind != "equal":
            found += [f"-{line}" for line in texts[0][i:j] if line.strip()] + [f"+{line}" for line in texts[1][k:m] if line.strip()]
    return found


def counts(name: str) -> tuple[int, int]:
    """Return how many lines the conversion adds to an app, and how many it removes."""
    lines = [line[0] for file in files(name) for line in changed(name, file)]
    return lines.count("+"), lines.count("-")


def row(app: App) -> str:
    """Return the app's row of the table."""
    (added, removed), method = counts(app.name), f"[`{app.method}`](../methods/{app.method}.md)"
    return f"| [`{app.name}`](../../examples/flower_apps/{app.name}) | {app.api} | {method} | {added} | {removed} |"


def block(app: App) -> str:
    """Return the app's changed lines, file by file."""
    parts = [f"# {file.name}\n" + "\n".join(lines) for file in files(app.name) if (lines := changed(app.name, file))]
    return "```diff\n" + "\n".join(parts) + "\n```"


def main() -> None:
    """Print the table, then the lines of each app."""
    print("\n".join([HEAD, *map(row, CONVERTED)]))
    for app in CONVERTED:
        print(f"\n## {app.name}\n\n{block(app)}")


if __name__ == "__main__":
    main()
