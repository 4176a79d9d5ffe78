"""Commands of `dflash-lab` that have a file of their own.

Each module has `add(commands)`, which adds its parser to argparse's sub-parsers and
sets `run`, a function of the parsed arguments that returns the exit status. Importing
one is light: the library is imported when a command runs.

Leaves out: `demo`, `generate` and `doctor`, which are in `cli.py`.
"""
