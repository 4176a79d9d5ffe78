"""Where the end of a text stood before: an index of its n-grams.

For every n-gram of up to `longest` tokens the index keeps the last places that followed
it with different tokens. One token is added at constant cost, so the index is kept up
while a text grows.

Leaves out: drafting (`ngram.py`), and how likely it is that a match goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

LONGEST = 8
REMEMBERED = 3  # places of an n-gram, each followed by another token


class Match(NamedTuple):
    """A place whose preceding tokens are the text's last ones.

    Attributes:
        place: position of the token that followed there.
        length: tokens that agree, at most `longest`.
        rank: 0 for the best match, then 1, 2, ...
    """

    place: int
    length: int
    rank: int


class SuffixIndex:
    """N-grams of one text, and what followed them.

    Args:
        longest: of the n-grams.
        remembered: places kept for each.

    Attributes:
        text: the tokens so far.
    """

    def __init__(self, longest: int = LONGEST, remembered: int = REMEMBERED):
        self.longest, self.remembered = longest, remembered
        self.text: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text = self.text
        for token in tokens:
            end = len(text)
            for n in range(1, min(self.longest, end) + 1):
                places = self._places.setdefault(tuple(text[end - n :]), [])
                # The latest place of each following token, the latest of all first.
                places[:] = [p for p in places if text[p] != token]
                places.insert(0, end)
                del places[self.remembered :]
            text.append(token)

    def matches(self, after: Sequence[int] = (), most: int = REMEMBERED) -> list[Match]:
        """Places that go on from the end of the text, longest agreement first.

        Args:
            after: tokens that are thought to come next; the match must end with them.
            most: matches, each followed by another token.
        """
        found: list[Match] = []
        seen: set[int] = set()
        end = [*self.text[-self.longest :], *after][-self.longest :]
        for n in range(len(end), len(after), -1):
            for place in self._places.get(tuple(end[-n:]), ()):
                if self.text[place] not in seen:
                    seen.add(self.text[place])
                    found.append(Match(place, n, len(found)))
                    if len(found) == most:
                        return found
        return found
