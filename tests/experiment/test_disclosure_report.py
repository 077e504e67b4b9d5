"""disclosure.csv and the table in summary.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_bn.run.disclosure_report import COLUMNS, DisclosureTotals, Kind, disclosure_csv, disclosure_table
from tests.experiment.inside import Disclosure, RoundRecord
from tests.experiment.resuming import run, small_run
from tests.integration.runs import table


def record(round: int, *disclosures: Disclosure) -> RoundRecord:
    return RoundRecord(round, "train", 0.1, disclosures=list(disclosures))


def kinds(records: Sequence[RoundRecord], label_counts: Mapping[int, Sequence[int]]) -> dict[tuple[int, str, str], Kind]:
    left = DisclosureTotals()
    for one in records:
        left.add(one)
    return left.kinds(label_counts)


def test_kinds_add_up_and_keep_the_smallest() -> None:
    found = kinds(
        [
            record(1, Disclosure(0, "moments", "m", 3, 10, 9, 90), Disclosure(0, "moments", "m", 3, 10, 9, 90)),
            record(2, Disclosure(0, "moments", "m", 3, 10, 5, 50), Disclosure(1, "weights", "w", 2, 7)),
            record(3, Disclosure(0, "moments", "m", 3, 10, 5, 50)),
        ],
        {0: (1, 2), 1: ()},
    )
    assert disclosure_csv(found).splitlines() == [
        ",".join(COLUMNS),
        "0,introduction,samples per class,1,1,1,6,,,,",
        "0,moments,m,3,4,3,40,5,50,2,fewer than 8 samples",
        "1,weights,w,2,1,1,7,,,,",
    ]
    text = "\n".join(disclosure_table(found))
    assert "| moments | m | 1 | 3 | 40 B | 3 | 5 (client 0, round 2) |" in text
    assert text.count("**warning**") == 1
    assert "client 0 revealed statistics of 5 samples in round 2" in text


def test_what_differs_in_the_number_of_batches_alone_is_one_line() -> None:
    def weights(client: int, batches: str) -> Disclosure:
        return Disclosure(client, "weights", f"the model's weights after {batches}", 3, 10)

    found = kinds(
        [
            record(1, weights(0, "58 batches"), weights(1, "101 batches"), weights(2, "1 batch, from which its gradient can be computed")),
            record(2, weights(0, "58 batches"), weights(1, "7 batches")),
        ],
        {},
    )
    assert len(found) == 4, "each is told apart in disclosure.csv"
    lines = [line for line in disclosure_table(found) if line.startswith("| weights")]
    assert lines == [
        "| weights | the model's weights after 7 to 101 batches | 2 | 3 | 20 B | 2 |  |",
        "| weights | the model's weights after 1 batch, from which its gradient can be computed | 1 | 3 | 10 B | 1 |  |",
    ]


def test_a_run_writes_them(tmp_path: Path) -> None:
    path = run(small_run(tmp_path, method="fedavg", batch_size=4, local_steps=1, checkpoint_every=0))
    rows = table(path / "disclosure.csv")
    sent = {row["section"]: row for row in rows if row["client"] == "2"}
    assert sent.keys() == {"weights", "statistics", "metrics", "introduction"}
    assert (sent["statistics"]["smallest-samples"], sent["statistics"]["warning"]) == ("4", "fewer than 8 samples")
    up = sum(int(row["bytes-up"]) for row in table(path / "clients.csv") if row["client"] == "2")
    assert int(sent["weights"]["bytes"]) + int(sent["statistics"]["bytes"]) == up
    text = (path / "summary.md").read_text()
    assert "## What left each client" in text
    assert "client 2 revealed statistics of 4 samples in round 1" in text
    quiet = run(small_run(tmp_path / "more", method="gn", batch_size=8, local_steps=2, share_label_counts=False))
    assert "**warning**" not in (quiet / "summary.md").read_text()
    assert not any(row["section"] == "introduction" for row in table(quiet / "disclosure.csv"))
