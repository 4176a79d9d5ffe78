"""Named pairs of target and drafter, and prompts to try them on.

`pair` loads a pair by name or from folders, `packaged_target` fetches the smol target,
`prompts` and its sources load prompt sets. In comes a name, out go models, tokenizer
and prompts.

Leaves out: training (`training/`) and other checkpoint formats (`interop/`).
"""
