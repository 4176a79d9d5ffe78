"""Checks of exercises: one module per lesson, one function per exercise.

    from dflash_lab.course.checks.noise import check_mask_words
    check_mask_words(mask_words)

A check takes what the reader wrote, tries it on small cases, and says which case, which
position, what was expected and what came.

Leaves out: solutions. A check computes what it expects in its own slow way.
"""
