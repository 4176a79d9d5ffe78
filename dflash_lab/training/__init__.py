"""Training drafters: prompts, the target's own answers, anchors, loss and loop."""
