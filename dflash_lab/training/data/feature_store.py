"""Writing the target features of a corpus to disk, once.

A store is a folder of safetensors shards and an `index.json` with the checksum and the
texts' hash of each. Shards are written one by one and whole, so a killed run loses at
most one and the same call goes on behind it; a damaged shard is made anew, and texts
added at the end of a corpus extend its store.

Leaves out: reading them (`features.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from dflash_lab.errors import DFlashLabError
from dflash_lab.files import write_text_atomically
from dflash_lab.pairs.packaged_target import sha256_of
from dflash_lab.target.target import Target
from dflash_lab.training.data.features import (
    OfflineFeatures,
    OnlineFeatures,
    is_whole,
    read_index,
)

# Padded tokens of a pass, and most tokens of a shard.
BATCH_TOKENS, SHARD_TOKENS = 4096, 100_000


def cache_features(
    target: Target,
    sequences: Sequence[Sequence[int]],
    target_layer_ids: Sequence[int],
    folder: Path,
    *,
    head_inputs: bool = False,
    quiet: bool = False,
) -> OfflineFeatures:
    """Run the target over every text and keep the tapped layers in a folder.

    Args:
        target: in the dtype in which it will decode.
        sequences: token ids of the texts.
        target_layer_ids: tapped layers.
        folder: where to write; what is there of the same target, layers and texts is
            used again.
        head_inputs: keep what the target's head reads too, for distillation.
        quiet: no size announcement.

    Returns:
        The store; it holds 2 * n * D bytes per token, and 2 * D more with head inputs.

    Raises:
        DFlashLabError: too little room on the disk, before any work is done.
    """
    folder = Path(folder)
    index, asked = read_index(folder), head_inputs
    # A store that holds more than is asked for serves as well.
    head_inputs = head_inputs or bool(index and index["head_inputs"])
    source = OnlineFeatures(target, target_layer_ids, head_inputs)
    made_of = {
        "target": target.fingerprint(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target_layer_ids": list(source.target_layer_ids),
        "width": source.width,
        "head_inputs": head_inputs,
    }
    groups = _shard_groups(sequences)
    wanted = [_texts_hash(texts) for texts in groups]
    folder.mkdir(parents=True, exist_ok=True)
    kept = _whole_shards(folder, made_of, wanted)
    for path in folder.glob("shard-*"):
        if path.name not in {shard["file"] for shard in kept.values()}:
            path.unlink()
    todo = [number for number in range(len(groups)) if number not in kept]
    tokens = sum(len(text) for number in todo for text in groups[number])
    _announce(folder, tokens, source, quiet or not todo)
    progress = tqdm(
        total=tokens, unit="token", unit_scale=True, desc="features", disable=not todo
    )
    for number in todo:
        name = f"shard-{number:05d}.safetensors"
        scratch = folder / f"{name}.partial"
        save_file(_shard(source, groups[number], progress), scratch)
        kept[number] = {
            "number": number,
            "file": name,
            "texts": wanted[number],
            "lengths": [len(text) for text in groups[number]],
            "sha256": sha256_of(scratch),
        }
        os.replace(scratch, folder / name)
        _write_index(folder, made_of, kept, complete=False)
    progress.close()
    _write_index(folder, made_of, kept, complete=True)
    return OfflineFeatures(folder, asked, verify=False)


def _whole_shards(folder: Path, made_of: dict, wanted: list[str]) -> dict[int, dict]:
    """Entries of the shards that can be used again, by number."""
    index = read_index(folder)
    if index is None or any(index.get(k) != v for k, v in made_of.items()):
        return {}
    return {
        shard["number"]: shard
        for shard in index["shards"]
        if shard["number"] < len(wanted)
        and shard["texts"] == wanted[shard["number"]]
        and is_whole(folder / shard["file"], shard)
    }


def _shard_groups(sequences: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Texts whose tokens fit a shard, in order; a longer text has one to itself."""
    groups: list[list[Sequence[int]]] = []
    size = 0
    for text in sequences:
        size += len(text)
        if not groups or size > SHARD_TOKENS:
            groups.append([])
            size = len(text)
        groups[-1].append(text)
    return groups


@torch.no_grad()
def _shard(
    source: OnlineFeatures,
    sequences: Sequence[Sequence[int]],
    progress: tqdm,
) -> dict[str, Tensor]:
    """Features of a shard's texts, end to end, computed in batches of like length."""
    ends = np.cumsum([len(s) for s in sequences]).tolist()
    hidden = torch.empty(ends[-1], source.width, dtype=torch.bfloat16)
    last = torch.empty(
        ends[-1] if source.with_head_inputs else 0,
        source.target.hidden_size,
        dtype=torch.bfloat16,
    )
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    while order:
        size = max(1, BATCH_TOKENS // len(sequences[order[-1]]))
        group, order = order[-size:], order[:-size]
        rows = [torch.tensor(sequences[i]) for i in group]
        states, inputs = source.batch(group, pad_sequence(rows, batch_first=True))
        for row, i in enumerate(group):
            length = len(sequences[i])
            place = slice(ends[i] - length, ends[i])
            hidden[place] = states[row, :length].cpu()
            if inputs is not None:
                last[place] = inputs[row, :length].cpu()
            progress.update(length)
    return {"features": hidden} | ({"head_inputs": last} if len(last) else {})


def _announce(folder: Path, tokens: int, source: OnlineFeatures, quiet: bool) -> None:
    width = source.width + source.with_head_inputs * source.target.hidden_size
    size, free = 2 * width * tokens, shutil.disk_usage(folder).free
    if size > free:
        raise DFlashLabError(
            f"features of {tokens:,} tokens need {size / 1e9:.1f} GB, and {folder} has "
            f"{free / 1e9:.1f} GB left; use online features, fewer texts or another "
            "folder"
        )
    if not quiet:
        tqdm.write(
            f"features: {tokens:,} tokens, {size / 1e9:.2f} GB in {folder} "
            f"({free / 1e9:.1f} GB free)",
            file=sys.stderr,
        )


def _write_index(folder: Path, made_of: dict, kept: dict, complete: bool) -> None:
    shards = [kept[number] for number in sorted(kept)]
    index = {**made_of, "complete": complete, "shards": shards}
    write_text_atomically(folder / "index.json", json.dumps(index) + "\n")


def _texts_hash(sequences: Sequence[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(np.asarray(sequence, dtype=np.int64).tobytes() + b"|")
    return digest.hexdigest()
