"""Several processes write one corpus: who am I, how many are we, and a meeting point.

`accelerate launch` (or any launcher that sets RANK and WORLD_SIZE) starts the command
several times; `accelerate.PartialState` brings the processes together. Only barriers
are needed, over gloo on the CPU, whatever device decodes.

Leaves out: what each process writes (`corpus_file.py`), and collectives of training.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from dflash_lab.errors import DFlashLabError


@dataclass(frozen=True)
class Processes:
    """This process among those that share the work.

    Attributes:
        rank: of this process, from 0.
        world: how many processes there are.
        local_rank: its number on this machine, for choosing a GPU.
        wait: returns once every process has called it.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    wait: Callable[[], None] = lambda: None


ALONE = Processes()


def processes_from_environment() -> Processes:
    """What the launcher's RANK, WORLD_SIZE and LOCAL_RANK say; alone without them.

    Raises:
        DFlashLabError: a WORLD_SIZE or RANK that makes no sense, or no `accelerate`.
    """
    numbers: dict[str, int] = {}
    for name, default in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "")):
        text = os.environ.get(name) or default or str(numbers["RANK"])
        if not text.isdigit():
            raise DFlashLabError(f"{name}={text!r} in the environment is no number")
        numbers[name] = int(text)
    world, rank = numbers["WORLD_SIZE"], numbers["RANK"]
    if world <= 1:
        return ALONE
    if rank >= world:
        raise DFlashLabError(
            f"RANK={rank} in the environment must be below WORLD_SIZE={world}"
        )
    try:
        from accelerate import PartialState
    except ImportError:
        raise DFlashLabError(
            f"WORLD_SIZE={world} needs accelerate; pip install accelerate, or unset it"
        ) from None
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # Processes meet only before and after hours of writing; a short limit would end
    # the one that is done first.
    state = PartialState(cpu=True, timeout=timedelta(days=30))

    def wait() -> None:
        try:
            state.wait_for_everyone()
        except RuntimeError:  # gloo's, when a connection is gone
            raise DFlashLabError(
                "another process of this run has ended early, see its message; what is "
                "written is kept, run the same again"
            ) from None

    return Processes(
        state.process_index, state.num_processes, numbers["LOCAL_RANK"], wait
    )
