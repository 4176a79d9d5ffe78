"""A corpus as a parquet file, for tools that read tables.

One row per answer; the header lies as JSON in the schema's metadata under `corpus`, so
nothing of a JSON Lines corpus is lost on the way there and back.

Leaves out: appending. A parquet file is written whole, from a JSON Lines file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from dflash_lab.errors import DFlashLabError

_KEY = b"corpus"


def require_pyarrow() -> None:
    """Say now, not after hours of writing, that parquet needs pyarrow.

    Raises:
        DFlashLabError: pyarrow is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise DFlashLabError(
            "a .parquet corpus needs pyarrow; pip install pyarrow, or give a path that "
            "ends in .jsonl"
        ) from None


def write_parquet(path: Path, header: dict, rows: list[dict]) -> None:
    """Write a whole corpus, atomically.

    Args:
        path: of the file.
        header: of the corpus.
        rows: its answers; fields that a row lacks become nulls.

    Raises:
        DFlashLabError: no pyarrow, a field with values of two types, a full disk.
    """
    require_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    names = dict.fromkeys(name for row in rows for name in row)
    scratch = path.with_name(f".{path.name}.writing")
    try:
        columns = {name: [row.get(name) for row in rows] for name in names}
        table = pa.table(columns).replace_schema_metadata({_KEY: json.dumps(header)})
        pq.write_table(table, scratch)
        os.replace(scratch, path)
    except (OSError, pa.ArrowException) as error:
        scratch.unlink(missing_ok=True)
        raise DFlashLabError(
            f"cannot write {path}: {error}; the answers are safe in the JSON Lines "
            "file beside it, run the same again"
        ) from None


def read_parquet(path: Path) -> tuple[dict, list[dict]]:
    """Header and rows of a parquet corpus.

    Raises:
        DFlashLabError: no pyarrow, or another kind of file.
    """
    require_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DFlashLabError(f"cannot read {path}: {error}") from None
    metadata = table.schema.metadata or {}
    if _KEY not in metadata:
        raise DFlashLabError(f"{path} has no corpus header in its schema's metadata")
    rows = [
        {name: value for name, value in row.items() if value is not None}
        for row in table.to_pylist()
    ]
    return json.loads(metadata[_KEY]), rows
