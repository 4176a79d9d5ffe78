"""Explore masks: change the block size and the anchors, hover a cell for its reason.

Leaves out: the pictures (`views/masks.py`).
"""

from __future__ import annotations

from dflash_lab.views.masks import block_diffusion_picture, drafter_picture, mask_view
from dflash_lab.views.view import View
from dflash_lab.views.widgets.shell import shell


def block_mask_explorer(length: int = 8):
    """The mask of block-diffusion training, for block sizes that divide `length`."""
    from ipywidgets import SelectionSlider

    sizes = [size for size in range(1, length + 1) if length % size == 0]
    chosen = SelectionSlider(options=sizes, value=sizes[1], description="block size")

    def show(block_size: int) -> View:
        caption = f"{length} noisy rows (~) and {length} clean ones, K = {block_size}"
        return mask_view(block_diffusion_picture(length, block_size), caption)

    return shell({"block_size": chosen}, show)


def drafter_mask_explorer(context_length: int = 12):
    """The mask of drafter training with two anchors over one context."""
    from ipywidgets import IntSlider

    controls = {
        "first": IntSlider(3, 1, context_length, description="anchor 0"),
        "second": IntSlider(7, 1, context_length, description="anchor 1"),
        "block_size": IntSlider(4, 2, 6, description="block size"),
    }

    def show(first: int, second: int, block_size: int) -> View:
        picture = drafter_picture((first, second), context_length, block_size)
        caption = (
            f"two blocks of K = {block_size} over the features f0 to "
            f"f{context_length - 1}"
        )
        return mask_view(picture, caption)

    return shell(controls, show)
