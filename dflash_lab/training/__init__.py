"""Training drafters: the target's own answers, anchors, loss and loop.

`corpus/` writes the text, `data/` makes it tensors, `objective` and `losses` compare
drafts with text, `parity` holds training against decoding, `run/` does it all.

Leaves out: what a drafter is (`drafter/`).
"""
