"""Medusa-style heads: every slot drafts on its own from one hidden state.

The parallel drafter without attention. DFlash drafts a block whose slots see each
other and the whole context; here slot k has one small residual block over the target's
last hidden state, and the target's frozen head behind it. All heads run in one product
of matrices, so drafting costs next to nothing, but a slot knows neither the known token
nor what its neighbours draft (Medusa-1 of arXiv 2401.10774, restated; one chain).

The row convention. A cycle starts with a known token, the anchor at position a, that
the target has not read yet. The last hidden state there is stands at a - 1 and predicts
the anchor through the target's own head. So head k reads row a - 1 and drafts the token
at a + k: the (k + 1)-th token behind its row, for k = 1..K-1.

Leaves out: trees of drafts, the anchor's embedding as an input, training
(`medusa_training.py`), decoding (`medusa_proposer.py`), and published checkpoints.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_lab.drafter.checkpoint import read_checkpoint, write_checkpoint
from dflash_lab.drafter.config import check_block_size
from dflash_lab.errors import DFlashLabError
from dflash_lab.target.target import Target

MODEL_TYPE = "dflash_lab_medusa"


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of the heads, and of the target they belong to.

    Attributes:
        block_size: K; there are K-1 heads.
        hidden_size: D of the target.
        vocab_size: V of the target.
        num_target_layers: N of the target.
    """

    block_size: int
    hidden_size: int
    vocab_size: int
    num_target_layers: int

    def __post_init__(self):
        check_block_size(self.block_size)

    @classmethod
    def for_target(cls, target: Target, block_size: int = 8) -> MedusaConfig:
        """Heads that fit a target."""
        sizes = target.hidden_size, target.vocab_size, target.num_layers
        return cls(block_size, *sizes)

    def to_dict(self, dtype: str) -> dict:
        """`config.json` of a folder whose weights have this dtype."""
        return {"model_type": MODEL_TYPE, "dtype": dtype, **asdict(self)}


class MedusaHeads(nn.Module):
    """K-1 residual blocks over the target's last hidden state.

    A fresh head is the identity: its logits are the target's own.

    Args:
        config: their shape.
    """

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = config
        width = config.hidden_size
        # The heads' matrices one below the other: one product serves all.
        self.linear = nn.Linear(width, (config.block_size - 1) * width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    @property
    def dtype(self) -> torch.dtype:
        return self.linear.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.linear.weight.device

    def forward(self, hidden: Tensor) -> Tensor:
        """What the target's head reads for each slot.

        Args:
            hidden: (..., D), the target's last hidden state behind its final norm.

        Returns:
            (..., K-1, D); place k - 1 is head k's.
        """
        hidden = hidden.to(self.dtype)
        inner = self.linear(hidden).unflatten(-1, (-1, self.config.hidden_size))
        return hidden[..., None, :] + F.silu(inner)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`, each atomically."""
        write_checkpoint(Path(folder), self.config, self.state_dict())

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, dtype: torch.dtype | None = None
    ) -> MedusaHeads:
        """Load heads that this class wrote.

        Raises:
            DFlashLabError: another kind of folder, or weights that are not those of
                its config.
        """
        heads = cls(_read_config(Path(folder)))
        heads.load_state_dict(read_checkpoint(Path(folder), heads.state_dict()))
        return heads.to(dtype).eval()


def _read_config(folder: Path) -> MedusaConfig:
    path = folder / "config.json"
    try:
        fields = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        if fields.pop("model_type", None) != MODEL_TYPE:
            raise DFlashLabError(
                f"{folder} holds no Medusa-style heads of this project; give a folder "
                "that MedusaHeads.save_pretrained wrote"
            )
        fields.pop("dtype", None)
        return MedusaConfig(**fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise DFlashLabError(
            f"{path} is damaged ({error}); copy the folder again"
        ) from None
