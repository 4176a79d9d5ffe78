"""One training run, from a config to a folder with a drafter.

`train` is the door, `trainer` the loop; `guards` refuse a changed target or past,
`metrics`, `progress`, `evaluate` and `card` tell what came of it, `background` and
`runs` are for watching. In comes a config, out goes a run folder.

Leaves out: the objective (`training/objective.py`) and the data (`training/data/`).
"""
