"""Doors to and from other programs.

`hf_generate` and `hf_assistant` decode behind `transformers`, `export` and `engines`
write what serving engines read, `speculators_*` convert another library's format,
`importers` and `authors_benchmark` read logs. Files and objects of others come and go.

Leaves out: running those programs.
"""
