"""Listening to the target: which of its hidden states a drafter reads, and when.

`taps` copies the hidden states of a few target layers out of a forward pass, `masks`
says who sees whom in a block, `attention` computes it, `cache` keeps keys and values by
position. In comes a `transformers` decoder, out go features, masks and caches.

Leaves out: projecting the features, which is the drafter's (`drafter/`).
"""
