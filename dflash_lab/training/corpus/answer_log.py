"""Where answers go, whoever writes them: appended at once, shared out, resumable.

`AnswerLog` says which prompts are still to be answered, appends each answer with one
system call, and when all processes are done puts the answers in the order of their
prompts. Whoever starts next, with whatever number of processes, joins the shards that
it finds and goes on.

Leaves out: where answers come from (`corpus.py`, `server_corpus.py`), and the files'
format (`corpus_file.py`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.corpus.corpus_file import (
    answers_on_disk,
    check_header,
    has_header,
    join_shards,
    json_line,
    read_corpus,
    read_json_lines,
    shards_of,
    whole_lines,
    working_file,
    write_rows,
)
from dflash_lab.training.corpus.parquet import (
    read_parquet,
    require_pyarrow,
    write_parquet,
)
from dflash_lab.training.corpus.processes import ALONE, Processes


class AnswerLog:
    """Where answers go; a context manager around the writing.

    Args:
        path: JSON Lines file, or `.parquet`; resumed if it is there.
        header: what made the corpus; prompt i was answered at its
            `temperatures[i % len]`.
        prompts: rows with `prompt_ids`; an answer's line repeats its prompt's fields.
        processes: those that share the prompts.

    Attributes:
        todo: indices of the prompts that this process is to answer.

    Raises:
        DFlashLabError: a `.parquet` path without pyarrow; on entering, if the file was
            made with other settings or other prompts; while writing, if the disk is
            full.
    """

    def __init__(
        self,
        path: Path,
        header: dict,
        prompts: Sequence[dict],
        processes: Processes = ALONE,
    ):
        self.path, self.prompts, self.processes = Path(path), prompts, processes
        if self.path.suffix == ".parquet":
            require_pyarrow()
        self.header = json.loads(json.dumps({**header, "num_prompts": len(prompts)}))
        self.todo: list[int] = []
        self._work = working_file(self.path)
        self._written = self._tokens = 0

    def __enter__(self) -> AnswerLog:
        if self.processes.rank == 0:
            _make_folder(self.path.parent)
            if self.path.exists() and not self._work.exists():
                write_rows(self._work, *read_parquet(self.path))
            if shards_of(self._work):
                join_shards(self._work, self.header)
        self.processes.wait()
        done = self._answered()
        rank, world = self.processes.rank, self.processes.world
        missing = [i for i in range(len(self.prompts)) if i not in done]
        self.todo = missing[rank::world]
        self._done = len(done)
        # No process may write before all have read what is done.
        self.processes.wait()
        self._open(self._work if world == 1 else _shard(self._work, rank, world))
        total = len(self.prompts if world == 1 else self.todo)
        self._started = time.monotonic()
        self._progress = tqdm(
            total=total,
            initial=total - len(self.todo),
            unit="answer",
            desc="corpus" if world == 1 else f"corpus, process {rank + 1} of {world}",
            smoothing=0,  # answers come in bursts: the average tells the time left
            disable=rank > 0,
        )
        return self

    def add(self, index: int, answer_ids: Sequence[int], truncated: bool) -> None:
        """Append one answer.

        Args:
            index: of its prompt.
            answer_ids: its tokens, with the stop token if it ended by itself.
            truncated: True if it met the limit of new tokens.

        Raises:
            DFlashLabError: the disk is full, or the file cannot be written.
        """
        temperatures = self.header["temperatures"]
        row = {"index": index, **self.prompts[index], "answer_ids": list(answer_ids)}
        row["temperature"] = temperatures[index % len(temperatures)]
        self._append({**row, "truncated": truncated})
        self._written += 1
        self._tokens += len(answer_ids)
        rate = self._tokens / max(time.monotonic() - self._started, 1e-9)
        self._progress.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        self._progress.update()

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._progress.close()
        self._file.close()
        if kind is None:
            self._finish()

    def __len__(self) -> int:
        """Answers in the file, once all processes have left the log."""
        if self.processes.world == 1:
            return self._done + self._written
        return len(read_corpus(self.path)[1])

    def _finish(self) -> None:
        self.processes.wait()
        # A file to which nothing came is left as it is: caches of features know it.
        if self.processes.rank == 0:
            if self.processes.world > 1 or self._written:
                join_shards(self._work, self.header)
            if self._work != self.path:
                write_parquet(self.path, *read_json_lines(self._work))
                self._work.unlink()
        self.processes.wait()

    def _answered(self) -> set[int]:
        if not has_header(self._work):
            return set()
        found, rows = read_json_lines(self._work)
        check_header(self._work, found, self.header)
        for row in rows:
            index = row["index"]
            if index >= len(self.prompts):
                continue  # of an earlier run with more prompts
            if row["prompt_ids"] != list(self.prompts[index]["prompt_ids"]):
                raise DFlashLabError(
                    f"{self._work} holds an answer to another prompt {index} than it "
                    "is to get now; the prompts have changed, choose another file or "
                    "delete it"
                )
        return {row["index"] for row in rows}

    def _open(self, path: Path) -> None:
        """Open for appending behind the last whole line; a new file gets its header."""
        try:
            size = whole_lines(path)
            # Unbuffered: once `add` returns, the answer is in the file.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
            self._file.truncate(size)
        except OSError as error:
            raise DFlashLabError(f"cannot write {path}: {error.strerror}") from None
        self._size = size
        if size == 0:
            self._append({"corpus": self.header})

    def _append(self, row: dict) -> None:
        data = json_line(row)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # half a line is no answer
            raise DFlashLabError(
                f"cannot write {self._file.name}: {error.strerror}; "
                f"{answers_on_disk(self.path)} answers are safe in it. Make room and "
                "run the same again: it goes on from there"
            ) from None
        self._size += len(data)


def _shard(path: Path, rank: int, world: int) -> Path:
    return path.with_name(f"{path.stem}.{rank}-of-{world}{path.suffix}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DFlashLabError(
            f"cannot make the folder {folder}: {error.strerror}"
        ) from None
