"""The model whose text is wanted, behind one interface.

`target` wraps any `transformers` decoder; `fused`, `fused_layers` and `packed` run the
usual ones, and the drafter, as functions of their weights. In come token ids and a
cache, out go logits and the tapped hidden states.

Leaves out: choosing tokens (`speculative/`).
"""
