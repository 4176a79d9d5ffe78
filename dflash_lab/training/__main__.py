"""`accelerate launch -m dflash_lab.training --config FILE`: one run, many processes."""

from __future__ import annotations

import argparse
import sys

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.run import launch


def main() -> int:
    """Parse the arguments of `dflash-lab train` and run it."""
    parser = argparse.ArgumentParser(prog="dflash_lab.training")
    launch.add_arguments(parser)
    try:
        return launch.run(parser.parse_args())
    except DFlashLabError as error:
        print(f"dflash_lab.training: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
