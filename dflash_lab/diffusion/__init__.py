"""Discrete diffusion from first principles, small enough to read in one sitting.

`forward` puts noise on words, `schedules` says how much of it when, `toy` checks the
theory on spaces small enough to enumerate, `model` is one transformer for three ways of
writing text, `objectives` trains them, `samplers` and `blocks` write, `study` compares.

Leaves out: conditioning on another model's features; that is the drafter's
(`dflash_lab.drafter.model`).
"""
