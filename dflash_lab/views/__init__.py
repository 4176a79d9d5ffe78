"""Pictures of a decode: plain data in, text, HTML or a matplotlib Figure out.

Every view is a pure function. Its HTML is a template of `templates/`, filled in by
`render`. matplotlib and Jinja are imported inside the functions that need them, so that
`import dflash_lab` stays light; `widgets/` are thin shells over views.

Leaves out: measuring anything (`measure/`).
"""
