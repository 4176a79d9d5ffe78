"""`dflash-lab export`: write a drafter as the folder another program reads.

Standard output has the line of the self-check and the command that serves the folder;
what the user should know about the engine goes to standard error. Leaves out the work
itself, which is in `dflash_lab.interop.export`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# As in `dflash_lab.interop.engines`, which is too heavy to import for a help text.
_ENGINES = ("dflash", "vllm", "sglang", "speculators")


def add(commands) -> None:
    """Add `export` to argparse's sub-parsers."""
    parser = commands.add_parser(
        "export",
        help="write the folder that vLLM, SGLang or speculators reads",
        description="Write a drafter as the folder an engine reads, with the command "
        "that serves it in its README.md, then read it back and compare every bit.",
    )
    parser.add_argument(
        "--drafter",
        required=True,
        help="folder or Hub repository, in DFlash's or speculators' format",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="new folder, or an earlier export, which is replaced",
    )
    parser.add_argument(
        "--for",
        dest="engine",
        choices=_ENGINES,
        default="dflash",
        help="who reads it; dflash is the published form (default: %(default)s)",
    )
    parser.add_argument(
        "--target",
        help="name or folder of the model it was trained for; needed except for "
        "dflash, or if a speculators folder names it",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export, and say what was checked and how to serve it.

    Raises:
        DFlashLabError: as `export_drafter`.
    """
    from dflash_lab.interop.export import export_drafter

    made = export_drafter(
        arguments.drafter, arguments.out, arguments.engine, arguments.target
    )
    for note in made.notes:
        print(f"note: {note}", file=sys.stderr)
    print(made.check)
    print(f"serve: {made.command}")
    return 0
