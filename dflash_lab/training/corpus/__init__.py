"""Training text: prompts, and the answers that the target itself writes to them.

`prompt_sources` and the grammars make prompts, `corpus` has them answered, here or by
a server, and `corpus_file` keeps what came. In come prompts, out go token ids on disk.

Leaves out: features and blocks (`training/data/`).
"""
