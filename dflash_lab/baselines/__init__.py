"""Other ways to draft and decode, as users would use them, to compare with.

EAGLE-3-style and Medusa-style heads, a small assistant for `generate`, and the
algorithm with growing caches; each with the command that trains it.

Leaves out: measuring (`measure/`).
"""
