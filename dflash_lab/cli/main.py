"""The command line: finds the command, and turns what goes wrong into one line.

Standard output carries results, standard error progress and errors. A wrong input is
one line on standard error and exit status 2; outputs that differ beyond certified ties
end `demo` with status 1; Ctrl-C ends with 130, and `generate` shows what it made.

Leaves out: the commands, which have modules of their own.
"""

from __future__ import annotations

import argparse
import os
import sys

from dflash_lab import __version__
from dflash_lab.cli import (
    bench,
    check,
    corpus,
    demo,
    doctor,
    explain,
    export,
    generate,
    lessons,
    train,
)
from dflash_lab.errors import DFlashLabError

COMMANDS = (
    demo,
    generate,
    bench,
    explain,
    corpus,
    train,
    check,
    export,
    lessons,
    doctor,
)


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except DFlashLabError as error:
        print(f"dflash-lab: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dflash-lab: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader left (`| head`); nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        reason = error.strerror or error
        print(f"dflash-lab: error: {where}{reason}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflash-lab",
        description="Learn, train and analyse DFlash speculative decoding.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return parser
