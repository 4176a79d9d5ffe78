"""What documents and docstrings name exists: files, modules, attributes."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from helpers import ROOT

PACKAGE = ROOT / "dflash_lab"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "data" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
SOURCES = sorted(PACKAGE.rglob("*.py"))
# `name.py` or `room/name.py` between backticks, perhaps behind `dflash_lab/`.
FILE = re.compile(r"`([\w/]+\.py)`")
DOTTED = re.compile(r"\bdflash_lab(?:\.\w+)+")


def exists(name: str, beside: Path) -> bool:
    """A file named from where it is told, from the package, or from the repository."""
    if "NN_name" in name:  # stands for all of them
        return True
    return any((base / name).is_file() for base in (beside, PACKAGE, ROOT))


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for attribute in parts[end:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_what_exists(path):
    text = path.read_text("utf-8")
    missing = [n for n in FILE.findall(text) if not exists(n, path.parent)]
    missing += [n for n in DOTTED.findall(text) if not resolves(n.rstrip("."))]
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", text)
    missing += [link for link in links if not (path.parent / link).exists()]
    assert missing == []


def test_sources_name_files_that_exist():
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in FILE.findall(path.read_text("utf-8"))
        if not exists(name, path.parent)
    ]
    assert missing == []
