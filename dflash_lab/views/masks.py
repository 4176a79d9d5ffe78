"""Pictures of attention masks in which every cell says why it is open or closed.

A mask is a table: rows look, columns are looked at. Hovering a cell gives the reason in
a sentence; so does `reason`.

Leaves out: the masks themselves (`conditioning/masks.py`, `diffusion/blocks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dflash_lab.errors import DFlashLabError
from dflash_lab.views.render import render
from dflash_lab.views.view import View

MOST_CELLS = 4096


@dataclass(frozen=True)
class MaskPicture:
    """A mask with names and reasons.

    Attributes:
        open: (rows, columns) truth values.
        rows: name of each row.
        columns: name of each column.
        reason: (row, column) to a sentence.
        row_groups: group of each row; a line is drawn where it changes.
        column_groups: group of each column.
    """

    open: Sequence[Sequence[bool]]
    rows: Sequence[str]
    columns: Sequence[str]
    reason: Callable[[int, int], str]
    row_groups: Sequence
    column_groups: Sequence


def mask_view(picture: MaskPicture, caption: str = "") -> View:
    """The mask as a table; open cells are filled and marked with a dot.

    Raises:
        DFlashLabError: more cells than a page should have.
    """
    cells = len(picture.rows) * len(picture.columns)
    if cells > MOST_CELLS:
        raise DFlashLabError(
            f"a mask of {cells} cells; the limit is {MOST_CELLS}, show a shorter text"
        )
    html = render(
        "views/mask.html",
        picture=picture,
        columns=list(zip(picture.columns, _edges(picture.column_groups), strict=True)),
        rows=list(zip(picture.rows, _edges(picture.row_groups), strict=True)),
        caption=caption,
    )
    width = max(map(len, picture.rows))
    text = [
        f"{name.ljust(width)}  {''.join('■' if x else '·' for x in row)}"
        for name, row in zip(picture.rows, picture.open, strict=True)
    ]
    return View(html, "\n".join([caption, *text] if caption else text))


def _edges(groups: Sequence) -> list[bool]:
    """Whether a line is drawn before each row or column."""
    return [False, *(a != b for a, b in pairwise(groups))]


def block_diffusion_picture(length: int, block_size: int) -> MaskPicture:
    """Who sees whom when a block-diffusion model trains: noisy text, clean text."""
    from dflash_lab.diffusion.blocks import block_diffusion_mask

    mask = block_diffusion_mask(length, block_size).tolist()
    names = [f"~{i}" for i in range(length)] + [str(i) for i in range(length)]
    groups = [
        (half, i // block_size) for half in ("noisy", "clean") for i in range(length)
    ]

    def reason(row: int, column: int) -> str:
        (mine, own), (theirs, other) = groups[row], groups[column]
        verb = "sees" if mask[row][column] else "does not see"
        if theirs == "noisy" and mine == "clean":
            why = "no clean row may look at noise, or the cache would hold it"
        elif theirs == "noisy":
            why = (
                "a block is denoised together"
                if own == other
                else ("another block's noise is of no use; its clean text is there")
            )
        elif mine == "noisy":
            why = (
                "earlier blocks are given, clean"
                if other < own
                else ("that would be the answer, or what comes after it")
            )
        else:
            why = (
                "clean text up to the end of the own block"
                if other <= own
                else ("later blocks are not written yet")
            )
        return (
            f"{mine} token {row % length} (block {own}) {verb} {theirs} token "
            f"{column % length} (block {other}): {why}"
        )

    return MaskPicture(mask, names, names, reason, groups, groups)


def drafter_picture(
    anchor_positions: Sequence[int], context_length: int, block_size: int
) -> MaskPicture:
    """Who sees whom when a DFlash drafter trains: anchors' blocks over one context.

    Args:
        anchor_positions: (N,) positions of the anchors, each at least 1.
        context_length: S, rows of target features.
        block_size: K.
    """
    import torch

    from dflash_lab.conditioning.masks import anchor_block_mask

    anchors = torch.tensor([list(anchor_positions)])
    mask = anchor_block_mask(anchors, context_length, block_size)[0, 0].tolist()
    blocks = [(n, k) for n in range(len(anchor_positions)) for k in range(block_size)]
    rows = [f"block {n}: " + ("anchor" if k == 0 else f"mask {k}") for n, k in blocks]
    columns = [f"f{s}" for s in range(context_length)]
    columns += [f"{n}.{k}" for n, k in blocks]
    column_groups = [-1] * context_length + [n for n, _ in blocks]

    def reason(row: int, column: int) -> str:
        n, k = blocks[row]
        anchor = anchor_positions[n]
        who = f"slot {k} of block {n} (position {anchor + k})"
        verb = "sees" if mask[row][column] else "does not see"
        if column < context_length:
            why = (
                "it lies before the anchor"
                if column < anchor
                else "when decoding, the target has not computed it yet"
            )
            return f"{who} {verb} the target's features of position {column}: {why}"
        m, j = blocks[column - context_length]
        why = (
            "the slots of a block see each other, both ways"
            if m == n
            else "blocks are separate exercises; only one exists when decoding"
        )
        return f"{who} {verb} slot {j} of block {m}: {why}"

    return MaskPicture(
        mask, rows, columns, reason, [n for n, _ in blocks], column_groups
    )
