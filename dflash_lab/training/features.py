"""Target features of a corpus, computed once and kept on disk.

Training passes over a small corpus many times; running the target each time would cost
more than the drafter. `cache_features` stores the tapped states of every token as
bfloat16 in one memory-mapped file and `FeatureCache` hands out batches of them.

Leaves out: shards, checksums and resuming.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dflash_lab.target import Target
from dflash_lab.trace import write_text_atomically


class FeatureCache:
    """Features of sequences laid end to end in one file.

    Args:
        path: the file, (total tokens, n*D) bfloat16.
        lengths: tokens of each sequence.
        width: n*D.
    """

    def __init__(self, path: Path, lengths: Sequence[int], width: int):
        shape = (sum(lengths), width)
        # numpy has no bfloat16: the file is read as 16-bit integers and viewed.
        self._memory = np.memmap(path, dtype=np.int16, mode="r+", shape=shape)
        self.features = torch.from_numpy(self._memory).view(torch.bfloat16)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).tolist()

    def batch(self, indices: Sequence[int]) -> Tensor:
        """`target_hidden` (B, S, n*D) of these sequences, zero behind their ends."""
        parts = [self.features[self.offsets[i] : self.offsets[i + 1]] for i in indices]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def feature_scale(self, samples: int = 20000) -> Tensor:
        """1 / rms of each feature, (n*D,) float32, over evenly spaced tokens.

        A few dimensions of the residual stream are hundreds of times larger than the
        others; unscaled they are all that a fresh projection sees.
        """
        step = max(1, len(self.features) // samples)
        picked = self.features[::step].float()
        # The median over chunks ignores the rare tokens with extreme activations.
        size = min(50, len(picked))
        chunks = picked[: len(picked) // size * size].view(-1, size, picked.shape[1])
        return chunks.pow(2).mean(dim=1).median(dim=0).values.add(1e-12).rsqrt()


@torch.inference_mode()
def cache_features(
    target: Target,
    sequences: Sequence[Sequence[int]],
    target_layer_ids: Sequence[int],
    path: Path,
    batch_tokens: int = 4096,
) -> FeatureCache:
    """Run the target over every sequence and keep the tapped layers.

    Args:
        target: in the dtype in which it will decode.
        sequences: token ids.
        target_layer_ids: tapped layers.
        path: where to write; a finished file of the same target, layers and texts is
            used again.
        batch_tokens: padded tokens per pass.

    Returns:
        The cache; it holds 2 * n * D bytes per token.
    """
    lengths = [len(sequence) for sequence in sequences]
    width = len(target_layer_ids) * target.hidden_size
    path = Path(path)
    made_of = _fingerprint(target, sequences, target_layer_ids)
    note = path.with_suffix(".sha256")
    if path.exists() and note.exists() and note.read_text("utf-8") == made_of:
        return FeatureCache(path, lengths, width)
    path.parent.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    scratch = path.with_suffix(".partial")
    scratch.unlink(missing_ok=True)
    np.memmap(scratch, dtype=np.int16, mode="w+", shape=(sum(lengths), width)).flush()
    cache = FeatureCache(scratch, lengths, width)
    order = sorted(range(len(sequences)), key=lambda i: lengths[i])
    progress = tqdm(total=sum(lengths), unit="token", unit_scale=True, desc="features")
    with target.tap(target_layer_ids) as tap:
        while order:
            size = max(1, batch_tokens // lengths[order[-1]])
            group, order = order[-size:], order[:-size]
            longest = max(lengths[i] for i in group)
            ids = torch.zeros(len(group), longest, dtype=torch.long)
            for row, i in enumerate(group):
                ids[row, : lengths[i]] = torch.tensor(sequences[i])
            # Padding lies behind each text, where a causal model does not look.
            target.model.base_model(input_ids=ids.to(target.device), use_cache=False)
            hidden = tap.take().to("cpu", torch.bfloat16)
            for row, i in enumerate(group):
                end = cache.offsets[i] + lengths[i]
                cache.features[cache.offsets[i] : end] = hidden[row, : lengths[i]]
                progress.update(lengths[i])
    progress.close()
    cache._memory.flush()
    os.replace(scratch, path)
    write_text_atomically(note, made_of)
    return FeatureCache(path, lengths, width)


def _fingerprint(
    target: Target,
    sequences: Sequence[Sequence[int]],
    target_layer_ids: Sequence[int],
) -> str:
    """Hash of everything that the features depend on."""
    digest = hashlib.sha256(target.fingerprint().encode())
    digest.update(str((tuple(target_layer_ids), str(target.dtype))).encode())
    for sequence in sequences:
        digest.update(np.asarray(sequence, dtype=np.int64).tobytes() + b"|")
    return digest.hexdigest()
