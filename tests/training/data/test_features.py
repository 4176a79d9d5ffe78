"""Online and offline features agree; stores survive kills, damage and growth."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from helpers import TESTS, random_target
from torch.nn.utils.rnn import pad_sequence

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.data import feature_store
from dflash_lab.training.data.feature_store import cache_features
from dflash_lab.training.data.features import OfflineFeatures, OnlineFeatures

TEXTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10], [3] * 9, [7, 1, 2, 2], [5, 6]]


def padded(indices):
    rows = [torch.tensor(TEXTS[i]) for i in indices]
    return pad_sequence(rows, batch_first=True)


def store(target, folder, texts=TEXTS, layers=(1, 3), **options):
    """Several shards, each of several batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_store, "BATCH_TOKENS", 6)
        patch.setattr(feature_store, "SHARD_TOKENS", 9)
        return cache_features(target, texts, layers, folder, quiet=True, **options)


def test_offline_features_equal_online_ones_and_a_plain_pass(tmp_path):
    target = random_target(0)
    offline = store(target, tmp_path / "f", head_inputs=True)
    online = OnlineFeatures(target, (1, 3), with_head_inputs=True)
    indices = [1, 0, 3]
    ids = padded(indices)
    found = offline.batch(indices, ids)
    tapped = online.batch(indices, ids)
    assert found[0].dtype == tapped[0].dtype == torch.bfloat16
    for row, i in enumerate(indices):
        with torch.inference_mode():
            states = target.model(
                torch.tensor([TEXTS[i]]), output_hidden_states=True
            ).hidden_states
        expected = (torch.cat([states[2], states[4]], -1), states[-1])
        length = len(TEXTS[i])
        for kind in range(2):
            stored, live = found[kind][row], tapped[kind][row]
            # One unit in the last place: sums may run in another order in a batch.
            for other in (live[:length], expected[kind][0].bfloat16()):
                torch.testing.assert_close(
                    stored[:length].float(), other.float(), rtol=2**-7, atol=1e-4
                )
            assert not stored[length:].any()
    assert len(list((tmp_path / "f").glob("shard-*.safetensors"))) > 2


def test_head_inputs_come_only_if_asked_for():
    target = random_target(0)
    source = OnlineFeatures(target, (1, 3))
    hidden, last = source.batch([0], padded([0]))
    assert hidden.shape == (1, 3, 64) and last is None


def shards(folder):
    return {p.name: p.stat().st_mtime_ns for p in folder.glob("shard-*")}


def test_a_finished_store_is_used_again_and_extended(tmp_path):
    target, folder = random_target(0), tmp_path / "f"
    first = store(target, folder, TEXTS[:4])
    before = shards(folder)
    store(target, folder, TEXTS[:4])
    assert shards(folder) == before
    grown = store(target, folder)
    after = shards(folder)
    assert len(first) == 4 and len(grown) == 6
    assert {name for name in before if after[name] == before[name]} >= set(
        sorted(before)[:-1]
    )
    fresh = store(target, tmp_path / "fresh")
    everything = list(range(6))
    ids = padded(everything)
    expected = fresh.batch(everything, ids)[0]
    assert torch.equal(grown.batch(everything, ids)[0], expected)


def test_another_target_other_layers_and_other_texts_are_noticed(tmp_path):
    target, folder = random_target(0), tmp_path / "f"
    store(target, folder)
    changed = [*TEXTS[:2], [9, 11], *TEXTS[3:]]
    for number, (other, texts, layers) in enumerate(
        ((random_target(1), TEXTS, (1, 3)), (target, TEXTS, (0, 3)))
    ):
        found = store(other, folder, texts, layers)
        fresh = store(other, tmp_path / f"fresh{number}", texts, layers)
        everything, ids = list(range(6)), padded(range(6))
        assert torch.equal(
            found.batch(everything, ids)[0], fresh.batch(everything, ids)[0]
        )
    store(target, folder)
    before = shards(folder)
    store(target, folder, changed)
    after = shards(folder)
    assert any(after[name] != before[name] for name in after)
    assert any(after[name] == before[name] for name in after)


def test_a_damaged_shard_is_named_and_made_anew(tmp_path):
    target, folder = random_target(0), tmp_path / "f"
    good = store(target, folder).batch([1], padded([1]))[0]
    before = shards(folder)
    victim = folder / "shard-00001.safetensors"
    data = bytearray(victim.read_bytes())
    data[-3] ^= 255
    victim.write_bytes(data)
    with pytest.raises(DFlashLabError, match=r"shard-00001.*damaged"):
        OfflineFeatures(folder)
    again = store(target, folder)
    assert torch.equal(again.batch([1], padded([1]))[0], good)
    after = shards(folder)
    assert [n for n in after if after[n] != before[n]] == ["shard-00001.safetensors"]
    victim.write_bytes(b"short")
    with pytest.raises(DFlashLabError, match=r"shard-00001.*damaged"):
        OfflineFeatures(folder)


def test_missing_stores_and_missing_head_inputs_are_refused(tmp_path):
    with pytest.raises(DFlashLabError, match="no finished feature store"):
        OfflineFeatures(tmp_path)
    store(random_target(0), tmp_path / "f")
    with pytest.raises(DFlashLabError, match="holds no head inputs"):
        OfflineFeatures(tmp_path / "f", with_head_inputs=True)


def test_a_store_with_head_inputs_serves_without(tmp_path):
    target, folder = random_target(0), tmp_path / "f"
    store(target, folder, head_inputs=True)
    before = shards(folder)
    hidden, last = store(target, folder).batch([0], padded([0]))
    assert last is None and hidden.shape == (1, 3, 64)
    assert shards(folder) == before
    assert (
        store(target, folder, head_inputs=True).batch([0], padded([0]))[1] is not None
    )


def test_too_little_room_is_said_before_any_work(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(100, 90, 10))
    with pytest.raises(DFlashLabError, match=r"need 0\.0 GB.*has 0\.0 GB left"):
        store(random_target(0), tmp_path / "f")
    assert not list((tmp_path / "f").glob("shard-*"))


def test_a_full_disk_leaves_the_shards_before_it(tmp_path, monkeypatch):
    target, folder = random_target(0), tmp_path / "f"
    real, calls = feature_store.save_file, []

    def save(tensors, path):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(feature_store, "save_file", save)
    with pytest.raises(OSError):
        store(target, folder)
    kept = shards(folder)
    monkeypatch.setattr(feature_store, "save_file", real)
    store(target, folder)
    after = shards(folder)
    whole = {n: t for n, t in kept.items() if n.endswith(".safetensors")}
    assert len(whole) == 2 and all(after[n] == t for n, t in whole.items())


# Where a child process finds helpers and this file.
PATHS = [str(TESTS), str(Path(__file__).parent)]


CHILD = """
import os, signal, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from helpers import random_target
from dflash_lab.training.data import feature_store
from test_features import store
real, calls = feature_store.save_file, []
def save(tensors, path):
    calls.append(path)
    if len(calls) == 3:
        Path(path).write_bytes(b"half a shard")
        os.kill(os.getpid(), signal.SIGKILL)
    real(tensors, path)
feature_store.save_file = save
store(random_target(0), Path({folder!r}))
"""


@pytest.mark.slow
def test_a_kill_loses_at_most_one_shard(tmp_path):
    folder = tmp_path / "f"
    code = CHILD.format(paths=PATHS, folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    index = json.loads((folder / "index.json").read_text("utf-8"))
    assert not index["complete"] and len(index["shards"]) == 2
    with pytest.raises(DFlashLabError, match="no finished feature store"):
        OfflineFeatures(folder)
    before = shards(folder)
    target = random_target(0)
    resumed, fresh = store(target, folder), store(target, tmp_path / "fresh")
    after = shards(folder)
    for shard in index["shards"]:
        assert after[shard["file"]] == before[shard["file"]]
    assert not list(folder.glob("*.partial"))
    everything, ids = list(range(6)), padded(range(6))
    assert torch.equal(
        resumed.batch(everything, ids)[0], fresh.batch(everything, ids)[0]
    )
