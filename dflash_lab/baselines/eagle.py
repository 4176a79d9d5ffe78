"""An EAGLE-3-style head: one layer that drafts token by token from its own output.

The drafter that DFlash is compared with. Three tapped layers of the target are fused to
one feature. At place t the layer reads the feature of token t and the embedding of
token t + 1, and predicts token t + 2; it then feeds its own output back in place of the
feature it cannot know. Each draft costs a pass of one row, where DFlash needs one pass
for all. Head and vocabulary are its own, cut to the most frequent tokens (arXiv
2503.01840, restated; draws a chain, not a tree).

Leaves out: trees of drafts, training (`eagle_training.py`), and published checkpoints.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_lab.compat import rope_settings
from dflash_lab.conditioning.attention import attend
from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.drafter.layers import DFlashMLP, RMSNorm, Rotary, rotate
from dflash_lab.errors import DFlashLabError
from dflash_lab.files import write_text_atomically


@dataclass(frozen=True)
class EagleConfig:
    """Shape of a head.

    Attributes:
        hidden_size, intermediate_size, num_attention_heads, num_key_value_heads,
        head_dim, rms_norm_eps, rope, max_position_embeddings: as the target's layers.
        vocab_size: V of the target.
        draft_vocab_size: tokens that the head can draft.
        target_layer_ids: tapped layers.
        num_target_layers: N of the target.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int

    @classmethod
    def for_target(cls, target_config, draft_vocab_size: int | None = None):
        """A head with the widths of a target's layers, tapping as EAGLE-3 does.

        Raises:
            DFlashLabError: a target with too few layers to tap three.
        """
        shape = DFlashConfig.for_target(
            target_config, mask_token_id=0, target_layer_ids=(1,)
        )
        depth, vocabulary = target_config.num_hidden_layers, target_config.vocab_size
        # Inputs of layers 2, N/2 and N-3 are outputs of the layers before them.
        taps = (1, depth // 2 - 1, depth - 4)
        if len(set(taps)) < 3 or list(taps) != sorted(taps):
            raise DFlashLabError(
                f"a target of {depth} layers is too shallow to tap layers {taps}; "
                "EAGLE-3's three taps need at least 8"
            )
        return cls(
            shape.hidden_size,
            shape.intermediate_size,
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
            shape.rms_norm_eps,
            rope_settings(target_config.to_dict()),
            shape.max_position_embeddings,
            vocabulary,
            min(draft_vocab_size or vocabulary, vocabulary),
            taps,
            depth,
        )


class EagleHead(nn.Module):
    """The head's layer, norms, projection and vocabulary.

    Args:
        config: its shape.
    """

    draft_ids: Tensor

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        width, d = config.hidden_size, config.head_dim
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.embedding_norm = RMSNorm(width, config.rms_norm_eps)
        self.feature_norm = RMSNorm(width, config.rms_norm_eps)
        self.q_proj = nn.Linear(2 * width, heads * d, bias=False)
        self.k_proj = nn.Linear(2 * width, shared * d, bias=False)
        self.v_proj = nn.Linear(2 * width, shared * d, bias=False)
        self.o_proj = nn.Linear(heads * d, width, bias=False)
        self.post_attention_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.mlp = DFlashMLP(width, config.intermediate_size)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        # Target id of each token that can be drafted.
        ids = torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_ids", ids)
        self.rotary = Rotary(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def fuse(self, target_hidden: Tensor) -> Tensor:
        """Tapped features (B, S, 3*D) -> (B, S, D)."""
        return self.fc(target_hidden.to(self.dtype))

    def queries_keys_values(
        self, embedding: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of rows: embedding and hidden (B, T, D), positions (B, T).

        Returns:
            queries (B, Hq, T, d), keys and values (B, Hkv, T, d).
        """
        both = [self.embedding_norm(embedding), self.feature_norm(hidden)]
        x = torch.cat(both, dim=-1)
        cos, sin = self.rotary(x, positions)

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

        queries = rotate(heads(self.q_proj(x)), cos, sin)
        keys = rotate(heads(self.k_proj(x)), cos, sin)
        return queries, keys, heads(self.v_proj(x))

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The rest of the layer: hidden (B, T, D), mixed (B, Hq, T, d) -> (B, T, D)."""
        hidden = hidden + self.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, V'), over the draft vocabulary."""
        return self.lm_head(self.norm(hidden))

    def unroll(self, features: Tensor, embedding: Tensor, steps: int) -> list[Tensor]:
        """The drafting of all places of a text at once, for training.

        Row t of step k is what the head makes of features up to token t and the k
        tokens behind it, fed one after the other: it predicts token t + k + 1. It sees
        the first step's rows up to t, and its own rows of the steps between.

        Args:
            features: (B, S, 3*D) of a text's tokens.
            embedding: (B, S, D) of the same tokens.
            steps: how often the head is fed its own output, plus one.

        Returns:
            For each step k = 1..steps, (B, S - k, D) outputs of rows 0..S-k-1.
        """
        length = features.shape[1]
        hidden = self.fuse(features)
        places = torch.arange(length, device=features.device)[None]
        outputs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for k in range(1, steps + 1):
            rows = length - k
            if rows < 1:
                break
            hidden = hidden[:, :rows]
            queries, key, value = self.queries_keys_values(
                embedding[:, k:], hidden, places[:, :rows] + k - 1
            )
            keys.append(key)
            values.append(value)
            mixed = _attend_chain(queries, keys, values)
            hidden = self.finish(hidden, mixed)
            outputs.append(hidden)
        return outputs

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {k: v.detach().contiguous().cpu() for k, v in self.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        config = {"model_type": "dflash_lab_eagle", **asdict(self.config)}
        text = json.dumps(config, indent=2) + "\n"
        write_text_atomically(folder / "config.json", text)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, dtype: torch.dtype | None = None
    ) -> EagleHead:
        """Load a head that this class wrote.

        Raises:
            DFlashLabError: another kind of folder.
        """
        path = Path(folder) / "config.json"
        config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        if config.pop("model_type", None) != "dflash_lab_eagle":
            raise DFlashLabError(f"{folder} holds no EAGLE-style head of this project")
        config["target_layer_ids"] = tuple(config["target_layer_ids"])
        head = cls(EagleConfig(**config))
        head.load_state_dict(load_file(Path(folder) / "model.safetensors"))
        return head.to(dtype).eval()


def _attend_chain(queries: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Row t sees the first keys up to t, and key t of every later step."""
    rows, first = queries.shape[2], keys[0]
    if len(keys) == 1:
        mask = torch.ones(rows, rows, dtype=torch.bool, device=queries.device).tril()
        return attend(queries, first, values[0], mask[None, None])
    group = queries.shape[1] // first.shape[1]

    def spread(x: Tensor) -> Tensor:
        return x[:, :, :rows].repeat_interleave(group, dim=1)

    scale = queries.shape[-1] ** -0.5
    scores = queries @ spread(first).transpose(-1, -2) * scale  # (B, H, T, T)
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=queries.device).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    own = [(queries * spread(k)).sum(-1, keepdim=True) * scale for k in keys[1:]]
    weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1)
    mixed = weights[..., :rows] @ spread(values[0])
    for j, value in enumerate(values[1:]):
        mixed = mixed + weights[..., rows + j, None] * spread(value)
    return mixed


def embed(table: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the target's table, (B, T) -> (B, T, D)."""
    return F.embedding(ids.to(table.device), table).to(dtype)
