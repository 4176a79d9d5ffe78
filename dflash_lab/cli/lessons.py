"""`dflash-lab lab` opens the lessons; `dflash-lab lessons` builds them from masters.

Leaves out: how a notebook is made of a master (`lessons.py`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from dflash_lab.files import shipped_folder


def add(commands) -> None:
    """Add the parsers of `lab` and `lessons`."""
    lab = commands.add_parser("lab", help="open JupyterLab on the lessons")
    lab.add_argument(
        "--folder",
        type=Path,
        help="put a copy there (default: the checkout's own, or dflash-lessons)",
    )
    lab.add_argument("--no-browser", action="store_true", help="only print the address")
    lab.set_defaults(run=run_lab)
    build = commands.add_parser("lessons", help="build the lessons from their masters")
    build.add_argument("numbers", nargs="*", help="such as 01 02 (default: all)")
    build.add_argument(
        "--no-run",
        action="store_true",
        help="keep the outputs of cells that have not changed, and run nothing",
    )
    build.add_argument(
        "--notebooks", type=Path, default=Path("notebooks"), help="default: %(default)s"
    )
    build.add_argument(
        "--site", type=Path, help="write the lessons as static pages there, no more"
    )
    build.add_argument(
        "--slides", type=Path, help="write slides of the lessons there, no more"
    )
    build.set_defaults(run=run_build)


def working_copy(shipped: Path, folder: Path) -> Path:
    """Copy lessons and exercises, but never over what is there already."""
    for source in sorted(shipped.glob("**/*.ipynb")):
        place = folder / source.relative_to(shipped)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
    return folder


def run_lab(arguments) -> int:
    """Open JupyterLab; returns its exit status."""
    from importlib.util import find_spec

    from dflash_lab.errors import DFlashLabError

    if find_spec("jupyterlab") is None:
        raise DFlashLabError("JupyterLab is missing; pip install 'dflash-lab[lab]'")
    shipped = shipped_folder("notebooks")
    folder = arguments.folder
    if folder is None and shipped.parent.name == "dflash_lab":
        folder = Path("dflash-lessons")  # what is installed is not to be edited
    if folder is not None:
        shipped = working_copy(shipped, folder)
    print(f"lessons: {shipped}")
    command = [sys.executable, "-m", "jupyterlab", str(shipped)]
    if arguments.no_browser:
        command.append("--no-browser")
    return subprocess.call(command)


def run_build(arguments) -> int:
    """Build lessons and exercises."""
    from dflash_lab.course.lessons import build
    from dflash_lab.course.site import build_site
    from dflash_lab.course.slides import build_slides
    from dflash_lab.errors import DFlashLabError

    for out, write in ((arguments.site, build_site), (arguments.slides, build_slides)):
        if out is not None:
            pages = write(arguments.notebooks, out)
            print(f"{len(pages)} pages, begin with {pages[0]}")
    if arguments.site is not None or arguments.slides is not None:
        return 0
    masters = sorted((arguments.notebooks / "masters").glob("[0-9][0-9]_*.py"))
    numbers = arguments.numbers
    wanted = [m for m in masters if not numbers or m.name[:2] in numbers]
    if not wanted:
        raise DFlashLabError(
            f"no master for {', '.join(numbers) or 'anything'} in "
            f"{arguments.notebooks / 'masters'}"
        )
    for master in wanted:
        lesson, exercises = build(master, arguments.notebooks, run=not arguments.no_run)
        print(f"{lesson}  {lesson.stat().st_size // 1000} kB\n{exercises}")
    return 0
