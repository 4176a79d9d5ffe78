"""The DFlash drafter: a small transformer that fills a whole block in one pass.

`config` is the published format, `layers` and `model` the network, `checkpoint` its
folder; `relatives` refuses formats that only look alike, `input_fusion` is the usual
conditioning, for comparison. In come fused target features and a block of embeddings,
out go its hidden states.

Leaves out: embedding and LM head, which are the target's (`target/`).
"""
