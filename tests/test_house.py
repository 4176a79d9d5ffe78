"""Rooms import downwards only, and no modules import each other in a circle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers import ROOT

PACKAGE = ROOT / "dflash_lab"

# From the ground up. A room may import itself and the rooms before it.
ORDER = [
    ("errors", "compat", "files"),
    ("conditioning",),
    ("drafter",),
    ("target",),
    ("speculative",),
    ("pairs",),
    ("interop",),
    ("training",),
    ("baselines",),
    ("diffusion",),
    ("clinic",),
    ("measure",),
    ("views",),
    ("course",),
    ("cli",),
    ("__main__",),
]
# Within training: text, then tensors of a step, then the objective, then the run.
TRAINING = [
    ("corpus",),
    ("data",),
    ("losses", "objective", "convention_checks", "parity"),
    ("run",),
    ("__main__",),
]


def name_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imports(path: Path, package: Path) -> set[str]:
    """Modules of the package that a file imports, inside functions too."""
    root, found = package.name, set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.startswith(f"{root}.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module == root or (node.module or "").startswith(f"{root}."):
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    file = package.parent / inner.replace(".", "/")
                    is_module = file.is_dir() or file.with_suffix(".py").is_file()
                    found.add(inner if is_module else node.module)
    return found - {root}


def graph(package: Path = PACKAGE) -> dict[str, set[str]]:
    files = package.rglob("*.py")
    return {name_of(file, package): imports(file, package) for file in files}


def upward(edges: dict[str, set[str]], prefix: str, order) -> list[str]:
    """Imports within `prefix` that point to a later room of the order."""
    level = {name: i for i, names in enumerate(order) for name in names}
    inner = f"{prefix}."

    def room(module: str) -> str:
        return module.removeprefix(inner).split(".")[0]

    found = []
    for module, others in edges.items():
        for other in others if module.startswith(inner) else ():
            if other.startswith(inner) and level[room(other)] > level[room(module)]:
                found.append(f"{module} imports {other}")
    return found


def test_every_room_imports_only_itself_and_the_rooms_below():
    assert upward(graph(), "dflash_lab", ORDER) == []
    assert upward(graph(), "dflash_lab.training", TRAINING) == []


def test_no_modules_import_each_other_in_a_circle():
    TopologicalSorter(graph()).prepare()


def test_the_rooms_are_those_of_the_order():
    inside = [p for p in PACKAGE.iterdir() if p.suffix == ".py" or p.is_dir()]
    rooms = {path.stem for path in inside if path.name != "__pycache__"}
    assert rooms == {name for names in ORDER for name in names} | {"__init__"}
    folders = [p for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"]
    assert len(folders) <= 14


def test_a_room_says_what_it_is_for_and_re_exports_nothing():
    for path in PACKAGE.rglob("__init__.py"):
        if path.parent == PACKAGE:
            continue
        tree = ast.parse(path.read_text("utf-8"))
        assert len(tree.body) == 1, f"{path} holds more than its docstring"
        lines = (ast.get_docstring(tree) or "").split("\n\n")
        assert len(lines) >= 3, f"{path}: what for, what is in it, what it leaves out"


@pytest.mark.parametrize("lazily", [False, True])
def test_upward_imports_and_circles_are_found(tmp_path, lazily):
    package = tmp_path / "house"
    for name, text in {
        "__init__.py": "",
        "low/__init__.py": "",
        "low/a.py": "from house.high import b",
        "high/__init__.py": "",
        "high/b.py": "from house.high.c import thing",
        "high/c.py": "import house.high.b\nthing = 1",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        body = text.replace("\n", "\n    ")
        text = f"def late():\n    {body or 'pass'}\n" if lazily else text
        (package / name).write_text(text, "utf-8")
    edges = graph(package)
    order = [("low",), ("high",)]
    assert upward(edges, "house", order) == ["house.low.a imports house.high.b"]
    with pytest.raises(CycleError):
        TopologicalSorter(edges).prepare()
