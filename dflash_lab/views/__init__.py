"""Pictures of a decode: plain data in, text, HTML or a matplotlib Figure out.

Every view is a pure function. matplotlib is imported inside the functions that draw, so
that `import dflash_lab` stays light; `widgets/` are thin shells over views.

Leaves out: measuring anything (`measure/`).
"""
