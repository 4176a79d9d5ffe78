"""The arguments that name a pair, and loading what they name.

Leaves out: everything done with a pair.
"""

from __future__ import annotations

import argparse
import platform
from typing import TYPE_CHECKING

from dflash_lab.errors import DFlashLabError

if TYPE_CHECKING:
    from dflash_lab.pairs.pair import Pair

# Parameters below which waiting for a second thread costs more than it brings.
SMALL_TARGET = 20_000_000


def has_fast_bfloat16() -> bool:
    """True if this processor multiplies bfloat16 in hardware.

    On x86 torch's own list of instruction sets decides: its matrix library says yes
    wherever it can emulate bfloat16, which is slow.
    """
    import torch

    if platform.machine().lower() in ("x86_64", "amd64"):
        names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, name, bool)() for name in names)
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(supported and supported())


def default_dtype(pair: str | None, device: str = "cpu") -> str:
    """The faster dtype for a pair on a device of this machine.

    bfloat16 pays where verifying K rows would cost several times one row in float32;
    the tiny pair is too small for that.
    """
    if not str(device).startswith("cpu"):
        return "bfloat16"
    return "bfloat16" if pair != "tiny" and has_fast_bfloat16() else "float32"


def add_pair_arguments(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Arguments of a command that works on a pair; `default` is the pair's name."""
    parser.add_argument(
        "--pair", default=default, help=f"tiny or smol (default: {default or 'smol'})"
    )
    parser.add_argument("--target", help="folder or Hub repository of another target")
    parser.add_argument("--drafter", help="folder or Hub repository of its drafter")
    parser.add_argument(
        "--dtype", help="float32 or bfloat16 (default: the faster one on this machine)"
    )
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--thinking",
        action="store_true",
        help="let a target that can think do so (its drafter must have learnt it)",
    )
    parser.add_argument(
        "--threads", type=int, help="default: one per core, one for small targets"
    )


def load_asked_pair(
    arguments: argparse.Namespace, *, with_drafter: bool = True, quiet: bool = False
) -> Pair:
    """The `Pair` that a command line asked for."""
    from dflash_lab.pairs.pair import load_pair

    _set_threads(arguments.threads)
    name = arguments.pair
    if arguments.target is None:
        name = name or "smol"
    elif name == "smol":
        name = None  # demo's default gives way to an explicit target
    dtype = arguments.dtype or default_dtype(name, arguments.device)
    pair = load_pair(
        name,
        target=arguments.target,
        drafter=arguments.drafter,
        dtype=dtype,
        device=arguments.device,
        with_drafter=with_drafter,
        thinking=arguments.thinking,
        quiet=quiet,
    )
    size = sum(p.numel() for p in pair.model.parameters())
    if arguments.threads is None and size < SMALL_TARGET:
        _set_threads(1)
    return pair


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is None:
        return
    if threads < 1:
        raise DFlashLabError(f"--threads {threads} must be 1 or more")
    torch.set_num_threads(threads)
