"""Measure how hard a text is to read: ``python -m tools.documentation.reading FILE...``.

Prints the words per sentence and Flesch's reading ease: 206.835 - 1.015 * words per sentence - 84.6 * syllables per
word (Flesch, A new readability yardstick, Journal of Applied Psychology 1948). 60 to 70 is plain English, below 30 a
scientific paper. Syllables are counted as groups of vowels, which is accurate enough to compare two versions of a
page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.documentation.pages import prose

WORD = re.compile(r"[A-Za-z0-9][\w'’.,/-]*")
END = re.compile(r"(?<=[.!?])\s+")


class Ease(NamedTuple):
    sentences: int
    words_per_sentence: float
    longest: int
    flesch: float


def sentences(paragraphs: Iterable[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        yield from (sentence for sentence in END.split(paragraph) if WORD.search(sentence))


def syllables(word: str) -> int:
    groups = len(re.findall(r"[aeiouy]+", word.lower()))
    silent = word.lower().endswith("e") and not word.lower().endswith("le") and groups > 1
    return max(1, groups - silent)


def ease(paragraphs: Iterable[str]) -> Ease:
    counts = [[syllables(word) for word in WORD.findall(sentence)] for sentence in sentences(paragraphs)]
    words = sum(map(len, counts))
    per_sentence, per_word = words / len(counts), sum(map(sum, counts)) / words
    return Ease(len(counts), per_sentence, max(map(len, counts)), 206.835 - 1.015 * per_sentence - 84.6 * per_word)


if __name__ == "__main__":
    for file in sys.argv[1:]:
        found = ease(prose(Path(file)))
        length = f"{found.sentences} sentences of {found.words_per_sentence:.1f} words, the longest {found.longest}"
        print(f"{file}: {length}; reading ease {found.flesch:.1f}")
