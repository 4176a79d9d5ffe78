"""Pictures of a decode: styled tokens, figures and a report, made from plain data.

Everything here is pure: trace in, text, HTML or a matplotlib Figure out. matplotlib is
imported inside the functions that draw, so that `import dflash_lab` stays light.

Leaves out: widgets, and measuring anything (`analysis/`).
"""
