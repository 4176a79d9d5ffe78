"""The speculative loop: propose, verify, accept, commit, until the text ends.

`generate` is the door. A `proposer` drafts, `acceptance` and `sampling` decide what
becomes text, `stopping` when it ends; `host_loop` serves everything, `static_loop` runs
a cycle without asking a tensor for its value. Out come token ids and a `trace`, which
`certify` can hold against plain decoding.

Leaves out: other ways to decode (`baselines/`) and looking at traces (`measure/`).
"""
