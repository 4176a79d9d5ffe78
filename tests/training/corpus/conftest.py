"""Fixtures of the corpus tests: the tiny target, and the command."""

from __future__ import annotations

import argparse

import pytest

from dflash_lab.cli import corpus as command
from dflash_lab.pairs.pair import load_pair


@pytest.fixture(scope="session")
def tiny():
    return load_pair("tiny", with_drafter=False)


@pytest.fixture(scope="session")
def run_command():
    """What `dflash-lab corpus` does, without the other commands."""

    def run(arguments):
        parser = argparse.ArgumentParser()
        command.add(parser.add_subparsers(required=True))
        parsed = parser.parse_args(["corpus", *map(str, arguments)])
        return parsed.run(parsed)

    return run
