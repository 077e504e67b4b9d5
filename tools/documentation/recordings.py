"""Make the recordings in docs/start/watch.md: what a run prints on a terminal, in a pipe, when interrupted, and when
resumed.

    python -m tools.documentation.recordings

The runs are real (a minute, one core). Each recording stands in the page below ``<!-- recorded: NAME -->``.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from tests.documentation.pages import ROOT
from tests.experiment.terminal import in_a_pipe, lines, on_a_terminal

PAGE = ROOT / "docs" / "start" / "watch.md"
SHARED = "model='mlp' clients=3"
CUT = f"{SHARED} method='fbn' rounds=60 evaluate-every=4 calibrate=0 name='cut'"
PIPE = f"{SHARED} method='fixbn' rounds=6 local-steps=10 evaluate-every=2 name='pipe'"
AT = 12  # the round in which the terminal is looked at, and Ctrl-C typed


def recorded() -> dict[str, str]:
    """Make all recordings. Return the name of each in the page -> its text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cut, came = on_a_terminal("run", "--run-config", CUT, type_at=f"round {AT}/", folder=folder)
        _, resumed = in_a_pipe("resume", "runs/cut", interrupt_at=f"[round {AT}/", folder=folder)
        whole, pipe = in_a_pipe("run", "--run-config", PIPE, folder=folder)
    assert (cut, whole) == (130, 0), came + pipe
    during = came[: came.index("left", came.index(f"round {AT}/")) + len("left")]
    after = lines(came)
    bar = max(place for place, line in enumerate(after) if "━" in line)
    first = next(place for place, line in enumerate(resumed.splitlines()) if "going on after" in line)
    return {
        "terminal": "\n".join(lines(during)),
        "pipe": pipe.rstrip(),
        "interrupted": "\n".join(after[bar:]),
        "resumed": "\n".join(resumed.splitlines()[first : first + 3]),
    }


def replaced(page: str, recordings: dict[str, str]) -> str:
    """Return ``page`` with its recordings replaced by ``recordings`` (name -> text)."""
    for name, text in recordings.items():
        parts = _block(name).split(page)
        if len(parts) != 5:
            raise ValueError(f"the page must have one block below <!-- recorded: {name} -->")
        page = "".join([parts[0], parts[1], text, "\n", *parts[3:]])
    return page


def of_page(page: str) -> dict[str, str]:
    """Return the recordings in a page: name -> text."""
    names = re.findall(r"^<!-- recorded: (\w+) -->$", page, re.MULTILINE)
    return {name: _block(name).split(page)[2].rstrip("\n") for name in names}


def _block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- recorded: {name} -->\n```text\n)(.*?)(^```$)", re.DOTALL | re.MULTILINE)


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(), recorded()))
    print(PAGE)
