"""From texts to the tensors of one training step.

`dataset` orders texts, `features` and `feature_store` hold the target's hidden states,
`anchors` and `batch` make blocks, `faults` bends them, `pipeline` is one process's
share. In come token ids, out goes a `TrainingBatch`.

Leaves out: the loss (`training/objective.py`).
"""
