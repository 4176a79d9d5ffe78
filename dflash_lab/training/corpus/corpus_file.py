"""The files of a corpus: a header line, then one JSON line per answer.

With several processes each has a shard file beside the output, such as
`corpus.0-of-2.jsonl`; `join_shards` puts what all of them hold into the one file, in
the order of the prompts. A `.parquet` output is made at the end from the working file
`corpus.parquet.jsonl`.

Leaves out: writing answers as they come (`answer_log.py`).
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.corpus.parquet import read_parquet

# Fields that describe a corpus but change no answer: answered prompts are compared
# one by one, and other versions differ by rounding at most.
DESCRIPTIVE = {"versions", "num_prompts", "prompt_source"}
# What a header without these fields means.
DEFAULTS = {"top_p": 1.0, "top_k": 0, "seed": 0}


def working_file(path: Path) -> Path:
    """The JSON Lines file that is appended to: the output, unless that is parquet."""
    path = Path(path)
    return path.with_name(path.name + ".jsonl") if path.suffix == ".parquet" else path


def shards_of(path: Path) -> list[Path]:
    """Shard files beside a JSON Lines file, of any number of processes."""
    name = re.compile(re.escape(path.stem) + r"\.\d+-of-\d+" + re.escape(path.suffix))
    if not path.parent.is_dir():
        return []
    return sorted(p for p in path.parent.iterdir() if name.fullmatch(p.name))


def answers_on_disk(path: Path) -> int:
    """Answers in an unfinished corpus, its working file and shards together."""
    work = working_file(path)
    files = [file for file in (work, *shards_of(work)) if has_header(file)]
    if not files and work != path and Path(path).exists():
        return len(read_parquet(path)[1])
    return len({row["index"] for f in files for row in read_json_lines(f)[1]})


def read_corpus(path: Path) -> tuple[dict, list[dict]]:
    """Header and rows of a corpus file, JSON Lines or parquet.

    A half-written last line, which a killed writer can leave, is left out.

    Raises:
        DFlashLabError: no such file, or not a corpus.
    """
    path = Path(path)
    if path.is_file():
        read = read_parquet if path.suffix == ".parquet" else read_json_lines
        return read(path)
    hint = "write one with write_corpus or dflash-lab corpus"
    if working_file(path).is_file() or shards_of(working_file(path)):
        hint = "there is an unfinished one: repeat the command that wrote it"
    raise DFlashLabError(f"no corpus at {path}; {hint}")


def read_json_lines(path: Path) -> tuple[dict, list[dict]]:
    """Header and rows of a JSON Lines corpus; a half-written last line is left out.

    Raises:
        DFlashLabError: no header, or a damaged line.
    """
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break  # a killed writer can leave a last line without its end
            try:
                rows.append(json.loads(line))
            except ValueError:
                raise DFlashLabError(
                    f"{path}, line {number} is damaged; delete that line and repeat "
                    "the command that wrote it"
                ) from None
    if not rows or not isinstance(rows[0], dict) or "corpus" not in rows[0]:
        raise DFlashLabError(f"{path} does not start with a corpus header")
    return rows[0]["corpus"], rows[1:]


def join_shards(path: Path, header: dict) -> None:
    """Put all answers, the file's and the shards', into the file in index order.

    Args:
        path: the JSON Lines file; the shards lie beside it and are deleted.
        header: of the file that is written.

    Raises:
        DFlashLabError: a file made with other settings, or a full disk.
    """
    shards = shards_of(path)
    rows: dict[int, dict] = {}
    for source in (path, *shards):
        if has_header(source):
            found, more = read_json_lines(source)
            check_header(source, found, header)
            # A run that was killed between joining and deleting left rows twice.
            rows.update((row["index"], row) for row in more)
    write_rows(path, header, [rows[index] for index in sorted(rows)])
    for shard in shards:
        shard.unlink()


def write_rows(path: Path, header: dict, rows: Iterable[dict]) -> None:
    """Write a whole JSON Lines corpus or nothing.

    Raises:
        DFlashLabError: a full disk; nothing is lost.
    """
    scratch = path.with_name(f".{path.name}.joining")
    try:
        with open(scratch, "wb") as file:
            file.write(json_line({"corpus": header}))
            file.writelines(map(json_line, rows))
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise DFlashLabError(
            f"cannot put the answers of {path} in order: {error.strerror}; all are "
            "safe where they were. Make room and run the same again"
        ) from None


def check_header(path: Path, found: dict, header: dict) -> None:
    """Refuse to go on with a file whose settings would give other answers.

    Raises:
        DFlashLabError: names each field that differs.
    """
    found, header = DEFAULTS | found, DEFAULTS | header
    names = sorted((found.keys() | header.keys()) - DESCRIPTIVE)
    other = [n for n in names if found.get(n) != header.get(n)]
    if other:
        listed = "; ".join(
            f"{n} was {found.get(n)!r}, is {header.get(n)!r}" for n in other
        )
        raise DFlashLabError(
            f"{path} was written with other settings ({listed}); choose another file "
            "or delete it"
        )


def json_line(row: dict) -> bytes:
    """One line of a JSON Lines file."""
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8")


def has_header(path: Path) -> bool:
    """True if the file is there and has its first line."""
    return path.is_file() and whole_lines(path) > 0


def whole_lines(path: Path) -> int:
    """Bytes up to and with the last line end; 0 for no file."""
    if not path.exists() or path.stat().st_size == 0:
        return 0
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return data.rfind(b"\n") + 1
