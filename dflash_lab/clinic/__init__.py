"""Drafters with one fault each, and how to find out which.

`family` loads tiny drafters that differ in one thing, `patients` presents them without
saying what is wrong, `diagnosis` examines a drafter, `symptoms` is the table of faults.

Leaves out: making the faults (`training/data/faults.py`).
"""
