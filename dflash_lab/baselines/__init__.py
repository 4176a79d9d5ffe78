"""Other ways to decode, as users would use them, to compare with.

Leaves out: measuring (`benchmarks/`).
"""
