"""The suffix index finds what a plain search over the text finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_lab.speculative.suffix_index import Match, SuffixIndex

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def plain_matches(text, after, longest, most):
    """Longest agreement first, the latest place first, a following token once."""
    end = [*text, *after]
    found, seen = [], set()
    for n in range(min(longest, len(end)), len(after), -1):
        wanted = end[-n:]
        for place in range(len(text) - 1, n - 1, -1):
            if text[place - n : place] == wanted and text[place] not in seen:
                seen.add(text[place])
                found.append(Match(place, n, len(found)))
    return found[:most]


@given(TEXTS, st.lists(st.integers(0, 3), max_size=3), st.integers(1, 5))
def test_it_finds_what_a_search_finds(text, after, longest):
    index = SuffixIndex(longest=longest, remembered=4)
    index.extend(text)
    expected = plain_matches(text, after, longest, 3)
    assert index.matches(after, most=3) == expected


@given(TEXTS, st.integers(0, 40))
def test_growing_in_pieces_is_growing_at_once(text, cut):
    whole, pieces = SuffixIndex(), SuffixIndex()
    whole.extend(text)
    pieces.extend(text[:cut])
    pieces.extend(text[cut:])
    assert whole.text == pieces.text == text
    assert whole.matches() == pieces.matches()


def test_by_hand():
    index = SuffixIndex()
    index.extend([5, 6, 7, 5, 6, 8, 5, 6])
    # Behind "5 6" came 8 (latest) and 7; both agree in two tokens.
    assert index.matches() == [Match(5, 2, 0), Match(2, 2, 1)]
    # Behind "6 8" came 5.
    assert index.matches([8]) == [Match(6, 3, 0)]
    assert index.matches([9]) == []
