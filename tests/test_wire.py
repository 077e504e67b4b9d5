"""What another side sent, made fit for a log."""

from __future__ import annotations

from fl_bn.support.wire import REASON, reason
from tests.listed import listed


@listed(
    ("came", "said"),
    [
        ("<class 'fl_bn.flower.wire.gate.Refused'>:<'this site has fl-bn 0.1.0'>", "Refused: this site has fl-bn 0.1.0"),
        ("<class 'ZeroDivisionError'>:<'division\nby zero'>", "ZeroDivisionError: division by zero"),
        ("<class 'ValueError'>:<'it's > 0, and ends like <'this'>'>", "ValueError: it's > 0, and ends like <'this'>"),
        ("<class 'a.B'>:<'cut", "B: cut"),
        (
            "\nKeyError: 1\n\nThe above exception was the direct cause\nB: of\n'y'\n\nThe above exception was the direct cause",
            "B: of 'y'",
        ),
        ("<class '" + "a" * 10**6, "<class '" + "a" * (REASON - 8) + " ..."),
        ("\x1b[31mred", " [31mred"),
        (None, ""),
    ],
)
def test_another_side_s_error_is_one_line_in_its_own_words(came: str | None, said: str) -> None:
    assert reason(came) == said
