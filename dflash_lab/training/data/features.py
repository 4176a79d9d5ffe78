"""Target features of training texts: tapped in the step, or read from disk.

`OnlineFeatures` runs the target on the texts of a step. `OfflineFeatures` reads the
shards that `feature_store.py` wrote: passing over a small corpus many times, running
the target each time would cost more than the drafter. Both round to bfloat16 and give
the same batch. For distillation the target's head inputs can come with the features.

Leaves out: which texts are in a step (`dataset.py`), and writing the shards.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash_lab.conditioning.taps import HiddenStateTap
from dflash_lab.errors import DFlashLabError
from dflash_lab.pairs.packaged_target import sha256_of
from dflash_lab.target.target import Target

Features = tuple[Tensor, Tensor | None]  # (B, S, n*D) and (B, S, D), bfloat16


class OnlineFeatures:
    """Features tapped from a pass of the target when they are needed.

    Args:
        target: in the dtype in which it will decode.
        target_layer_ids: tapped layers.
        with_head_inputs: also give what the target's head reads.
    """

    def __init__(
        self,
        target: Target,
        target_layer_ids: Sequence[int],
        with_head_inputs: bool = False,
    ):
        self.target, self.with_head_inputs = target, with_head_inputs
        self.target_layer_ids = tuple(target_layer_ids)
        self.width = len(self.target_layer_ids) * target.hidden_size

    @torch.no_grad()
    def batch(self, indices: Sequence[int], input_ids: Tensor) -> Features:
        """Features of these texts.

        Args:
            indices: numbers of the texts (not used here).
            input_ids: (B, S) int64, zero behind their ends.

        Returns:
            `target_hidden` (B, S, n*D) bfloat16, and head inputs (B, S, D) bfloat16 or
            None. Rows behind a text's end are arbitrary; no block looks there.
        """
        model = self.target.model
        with HiddenStateTap(model, self.target_layer_ids) as tap:
            # Padding lies behind each text, where a causal model does not look.
            output = model.base_model(
                input_ids=input_ids.to(self.target.device), use_cache=False
            )
            hidden = tap.take()
        assert hidden is not None  # layers are tapped
        last = output.last_hidden_state.bfloat16() if self.with_head_inputs else None
        return hidden.bfloat16(), last


class OfflineFeatures:
    """Features read from the shards of a folder.

    Args:
        folder: written by `feature_store.cache_features`.
        with_head_inputs: also give what the target's head reads.
        verify: compare every shard with its checksum first.

    Raises:
        DFlashLabError: no finished store, or a damaged shard, named.
    """

    def __init__(self, folder: Path, with_head_inputs: bool = False, verify=True):
        self.folder = Path(folder)
        index = read_index(self.folder)
        if index is None or not index["complete"]:
            raise DFlashLabError(
                f"{self.folder} is no finished feature store; run cache_features again"
            )
        if with_head_inputs and not index["head_inputs"]:
            raise DFlashLabError(
                f"{self.folder} holds no head inputs, which the kl loss needs; delete "
                "the folder, or use online features"
            )
        self.width, self.with_head_inputs = index["width"], with_head_inputs
        self._shards, self._place = [], []
        for shard in index["shards"]:
            path = self.folder / shard["file"]
            if verify and not is_whole(path, shard):
                raise DFlashLabError(
                    f"{path} is missing or damaged (its checksum is not that of "
                    "index.json); run cache_features again, it makes only this shard "
                    "anew"
                )
            self._shards.append(safe_open(path, framework="pt"))
            start = 0
            for length in shard["lengths"]:
                self._place.append((len(self._shards) - 1, start, start + length))
                start += length

    def __len__(self) -> int:
        return len(self._place)

    def batch(self, indices: Sequence[int], input_ids: Tensor) -> Features:
        """As `OnlineFeatures.batch`; rows behind a text's end are zero."""
        length = input_ids.shape[1]
        hidden = self._gather("features", indices, length)
        if not self.with_head_inputs:
            return hidden, None
        return hidden, self._gather("head_inputs", indices, length)

    def _gather(self, name: str, indices: Sequence[int], length: int) -> Tensor:
        parts = []
        for i in indices:
            shard, start, end = self._place[i]
            part = self._shards[shard].get_slice(name)[start : min(end, start + length)]
            parts.append(part)
        return pad_sequence(parts, batch_first=True)


def feature_scale(parts: Sequence[Tensor]) -> Tensor:
    """1 / rms of each feature, (n*D,) float32, over some texts' features.

    A few dimensions of the residual stream are hundreds of times larger than the
    others; unscaled they are all that a fresh projection sees. The median over texts
    ignores the rare tokens with extreme activations.

    Args:
        parts: each (S, n*D), the features of one text without padding.
    """
    squares = [part.float().pow(2).mean(dim=0) for part in parts]
    return torch.stack(squares).median(dim=0).values.add(1e-12).rsqrt()


def read_index(folder: Path) -> dict | None:
    """`index.json` of a store, None if there is none."""
    path = folder / "index.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def is_whole(path: Path, shard: dict) -> bool:
    """Whether a shard's file is there, readable, and has the checksum of its entry."""
    try:
        safe_open(path, framework="pt")
        return sha256_of(path) == shard["sha256"]
    except (OSError, SafetensorError):
        return False
