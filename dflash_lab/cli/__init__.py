"""The commands of `dflash-lab`: one module each, and `main`, which finds them.

Each module has `add(commands)`, which adds its parser to argparse's sub-parsers and
sets `run`, a function of the parsed arguments that returns the exit status. Importing
one is light: the library is imported when a command runs.

Leaves out: the work itself, which lives in the library.
"""
