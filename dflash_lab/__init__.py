"""dflash_lab: learn, train and analyse DFlash speculative decoding.

Shape comments use one legend: B batch, S context, N anchors, K block size, D width,
V vocabulary; n is the number of tapped target layers, T the rows of a target pass.
"""

__version__ = "0.1.0"
