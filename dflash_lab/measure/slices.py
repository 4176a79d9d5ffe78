"""Where drafts hold: acceptance by place, token, and how sure the target is.

Works on the slots of a trace as a DataFrame (`DecodeTrace.to_frame`, with details for
entropy, margin and probabilities). Every slice counts the drafts that were reached,
that is, behind accepted ones only, and says how many were accepted.

Leaves out: figures (`viz/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def reached_slots(frame):
    """The rows of a slot frame whose earlier drafts were all accepted.

    Adds `place`, the index of the slot's token among the new tokens of its prompt.
    """
    import pandas as pd

    if frame.empty:
        return frame.assign(place=pd.Series(dtype=int))
    keys = ["prompt", "cycle"]
    if "set" in frame:
        keys = ["set", *keys]
    ordered = frame.sort_values([*keys, "slot"])
    before = ordered.groupby(keys)["accepted"].transform(
        lambda flags: flags.shift(fill_value=True).cummin()
    )
    rows = ordered[before.astype(bool)].copy()
    first = rows.groupby([k for k in keys if k != "cycle"])["start"].transform("min")
    rows["place"] = rows["start"] - first + rows["slot"]
    return rows


def acceptance_by(frame, column: str, bins: int | Sequence[float] | None = None):
    """Conditional acceptance by the values, or the bins, of a column.

    Args:
        frame: of `DecodeTrace.to_frame`.
        column: such as `slot`, `place`, `target_entropy`, `target_margin`.
        bins: a number of equally filled bins, or edges; None for every value.

    Returns:
        DataFrame with the column (the bin's middle value if binned), `reached`,
        `accepted` and `rate`.
    """
    import pandas as pd

    rows = reached_slots(frame).dropna(subset=[column])
    values = rows[column].astype(float)
    key = values
    # Few values need no bins, and equal ones could not be parted.
    if isinstance(bins, int) and values.nunique() > bins:
        key = pd.qcut(values, bins, duplicates="drop")
    elif bins is not None and not isinstance(bins, int):
        key = pd.cut(values, list(bins))
    groups = rows.assign(value=values).groupby(key, observed=True)
    found = groups.agg(
        value=("value", "median"),
        reached=("accepted", "size"),
        accepted=("accepted", "sum"),
    ).reset_index(drop=True)
    found["rate"] = found["accepted"] / found["reached"]
    return found.rename(columns={"value": column})


def acceptance_by_token(frame, classify: Callable[[int], str]):
    """Conditional acceptance by the class of the target's own token.

    Args:
        frame: of `DecodeTrace.to_frame`.
        classify: token id to class, see `token_class`.
    """
    rows = reached_slots(frame)
    rows = rows[rows["target_token"] >= 0]
    key = rows["target_token"].map(classify)
    found = rows.groupby(key)["accepted"].agg(["size", "sum"]).reset_index()
    found.columns = ["class", "reached", "accepted"]
    found["rate"] = found["accepted"] / found["reached"]
    return found


def token_class(text: str) -> str:
    """`space`, `digit`, `punctuation`, `word start` (behind a space), `word part`, or
    `other`, of a token's text."""
    bare = text.strip()
    if not bare:
        return "space"
    if bare.isdigit():
        return "digit"
    if not any(char.isalnum() for char in bare):
        return "punctuation"
    if bare.isalpha():
        return "word start" if text[:1].isspace() else "word part"
    return "other"


def calibration(frame, bins: int = 10):
    """Does the drafter know when it is right? Its probability against acceptance.

    Args:
        frame: of `DecodeTrace.to_frame`, with details.
        bins: equally wide bins of the draft's probability.

    Returns:
        DataFrame with `draft_prob` (mean in the bin), `reached`, `accepted`, `rate`,
        and in `attrs["error"]` the expected calibration error: the mean distance of
        probability and rate, weighted by drafts.
    """
    import numpy as np
    import pandas as pd

    rows = reached_slots(frame).dropna(subset=["draft_prob"])
    edges = np.linspace(0, 1, bins + 1).tolist()
    key = pd.cut(rows["draft_prob"], edges, include_lowest=True)
    found = (
        rows.groupby(key, observed=True)
        .agg(
            draft_prob=("draft_prob", "mean"),
            reached=("accepted", "size"),
            accepted=("accepted", "sum"),
        )
        .reset_index(drop=True)
    )
    found["rate"] = found["accepted"] / found["reached"]
    gaps = (found["rate"] - found["draft_prob"]).abs() * found["reached"]
    total = found["reached"].sum()
    found.attrs["error"] = float(gaps.sum() / total) if total else float("nan")
    return found
