"""Files whole or not at all, what ships with the package, and what machine this is.

Leaves out: formats; each room writes its own.
"""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path

from dflash_lab.errors import DFlashLabError


def shipped_folder(name: str) -> Path:
    """A folder that ships with the package: `data` or `notebooks`.

    Raises:
        DFlashLabError: it is neither in this checkout nor in the installed package.
    """
    package = Path(__file__).resolve().parent
    for folder in (package.parent / name, package / name):
        if folder.is_dir():
            return folder
    raise DFlashLabError(
        f"no folder {name!r} beside {package}; install the package again, or clone "
        "the repository"
    )


def data_root() -> Path:
    """Folder with prompts and checkpoints, in a checkout or an installed package."""
    return shipped_folder("data")


def environment() -> dict:
    """Versions and machine, for headers and cards."""
    # Imported here: a command that only parses its arguments must not wait for torch.
    import torch
    import transformers

    from dflash_lab import __version__

    return {
        "dflash_lab": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def write_text_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing: a new file beside it, then one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
