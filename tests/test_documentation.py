"""README's two commands, the config page and the records' columns are what the code has. Blocks and links: tests/documentation."""

import re
from pathlib import Path

from fl_bn.run.config import RunConfig
from fl_bn.run.history import client_columns, round_columns
from fl_bn.run.keys import described
from fl_bn.task import TASKS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def block(marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n```bash\n(.*?)\n```\n<!-- end -->", README, re.DOTALL)
    assert found, f"README.md has no command under <!-- {marker} -->"
    return found[1]


def test_two_commands_do_all_the_set_up() -> None:
    assert block("first result").endswith("flwr run .")
    assert block("tests").endswith("pytest")
    assert "\n" not in block("first result") + block("tests"), "one command each"


def test_config_page_is_the_config() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    assert page.endswith(described(RunConfig.keys()) + "\n"), "write it anew: fl-bn config"


def test_columns_of_the_csv_files_are_unique() -> None:
    for columns in (columns(task()) for task in TASKS.values() for columns in (round_columns, client_columns)):
        assert len(set(columns)) == len(columns)
