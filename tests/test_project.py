"""The project's own files agree with each other."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PACKAGE = ROOT / "dflash_lab"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def requirements():
    names = list(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        names += extra
    return {Requirement(line).name.lower(): Requirement(line) for line in names}


def constraints():
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [Requirement(x) for x in lines if x.strip() and not x.startswith("#")]
    return {pin.name.lower(): pin for pin in pins}


def test_every_requirement_is_pinned_within_its_range():
    pins = constraints()
    assert set(pins) == set(requirements())
    for name, requirement in requirements().items():
        (pin,) = pins[name].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), name


def test_ranges_have_no_upper_caps():
    for requirement in requirements().values():
        operators = {s.operator for s in requirement.specifier}
        assert operators <= {">="}, requirement
    assert requirements()["torch"].specifier == SpecifierSet(">=2.9")
    assert requirements()["transformers"].specifier == SpecifierSet(">=5.15")
    assert PROJECT["requires-python"] == ">=3.11"


def test_conda_environment_installs_the_same_through_pip():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    (pip,) = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    assert f"python{PROJECT['requires-python']}" in conda and "pip" in conda
    assert pip == ["-c constraints.txt", "-e .[lab,train,dev]"]
    assert {"lab", "train", "dev"} == set(PROJECT["optional-dependencies"])


def test_readme_and_ci_call_the_same_tests():
    readme = (ROOT / "README.md").read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    assert "python -m pytest" in readme and "make test" in readme
    assert "python -m pytest" in makefile
    assert "make test" in script


@pytest.mark.parametrize("module", ["dflash_lab", "dflash_lab.cli.main"])
def test_import_is_light(module):
    code = (
        f"import sys, {module}; "
        "heavy = {'matplotlib', 'pandas', 'ipywidgets', 'torch', 'transformers'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_public_names_exist():
    import dflash_lab

    assert 10 <= len(dflash_lab.__all__) <= 20
    for name in dflash_lab.__all__:
        assert getattr(dflash_lab, name).__name__ == name
        assert name in dir(dflash_lab)
    with pytest.raises(AttributeError):
        _ = dflash_lab.no_such_name


def test_every_module_says_what_it_leaves_out():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text("utf-8")
        docstring = ast.get_docstring(ast.parse(text))
        assert docstring, path
        lines = len(text.splitlines())
        assert lines <= 300, f"{path} has {lines} lines"
        if lines > 30:
            assert "Leaves out" in " ".join(docstring.split()), path


def test_functions_can_be_read_at_a_glance():
    long = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            if lines > 50:
                long.append(f"{path.relative_to(ROOT)}: {node.name} has {lines} lines")
    assert long == []


def test_public_functions_are_documented():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                public = not node.name.startswith("_")
                assert not public or ast.get_docstring(node), f"{path}: {node.name}"


def test_the_library_never_sets_a_global_seed():
    pattern = re.compile(r"torch\.manual_seed\(|random\.seed\(")
    for path in PACKAGE.rglob("*.py"):
        if path.name == "make_tiny_target.py":  # a program, not the library
            continue
        assert not pattern.search(path.read_text("utf-8")), path
