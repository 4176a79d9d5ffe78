"""Pairs: a target, its drafter, its tokenizer and its prompt sets, by one name.

`load_pair` is the only door. `tiny` is made by this project and lies in the repository;
`smol` is a real instruct model with a drafter trained here; any other pair is two
folders or Hub repositories, loaded through the ordinary `transformers` loaders.

Leaves out: fetching the packaged target (`packaged_target.py`) and prompt files
(`prompts.py`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.drafter.variants import load_drafter
from dflash_lab.errors import DFlashLabError
from dflash_lab.files import data_root
from dflash_lab.pairs.packaged_target import progress_bars, smol_target_folder
from dflash_lab.speculative.proposer import check_pair
from dflash_lab.target.fused import as_target
from dflash_lab.target.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OWN_DRAFTERS = {"tiny": "tiny/drafter", "smol": "smol-dflash"}
PAIR_NAMES = tuple(OWN_DRAFTERS)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Pair:
    """Everything that decoding a prompt needs.

    Attributes:
        name: `tiny`, `smol`, or the target's path.
        target: the target, ready to verify.
        drafter: its drafter; None if none was asked for.
        tokenizer: the target's; None if its folder has none.
        stop_token_ids: ids that end an answer.
        prompt_sets: names of the held-out prompt sets meant for this pair.
        thinking: passed to the chat template as `enable_thinking`. Drafters are
            trained for one mode; the published `-b16` ones for answers without it.
    """

    name: str
    target: Target
    drafter: DFlashDraftModel | None
    tokenizer: PreTrainedTokenizerBase | None
    stop_token_ids: tuple[int, ...]
    prompt_sets: tuple[str, ...] = ()
    thinking: bool = False

    @property
    def model(self) -> PreTrainedModel:
        """The target's `transformers` model."""
        return self.target.model

    def encode(self, turns: str | Sequence[str]) -> list[int]:
        """Token ids of a conversation that the target should answer.

        Args:
            turns: one user message, or messages of user and assistant in turn that
                end with the user's.

        Raises:
            DFlashLabError: an empty user message, a conversation that does not end
                with the user's, or no tokenizer.
        """
        turns = [turns] if isinstance(turns, str) else list(turns)
        if not turns or not all(turn.strip() for turn in turns[::2]):
            raise DFlashLabError("the prompt is empty; give at least one word")
        if len(turns) % 2 == 0:
            raise DFlashLabError(
                f"a conversation of {len(turns)} messages ends with the assistant's; "
                "the last one must be the user's"
            )
        roles = itertools.cycle(("user", "assistant"))
        pairs = zip(roles, turns, strict=False)
        return self.encode_messages([{"role": r, "content": c} for r, c in pairs])

    def encode_messages(self, messages: Sequence[dict]) -> list[int]:
        """Token ids of chat messages (role and content) that the target should answer.

        Raises:
            DFlashLabError: no tokenizer, or a message that its chat template refuses.
        """
        from jinja2 import TemplateError

        tokenizer = self.need_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            return tokenizer.encode("\n".join(m["content"] for m in messages))
        try:
            ids = tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                enable_thinking=self.thinking,
            )
        except TemplateError as error:
            roles = ", ".join(m["role"] for m in messages)
            raise DFlashLabError(
                f"the chat template of {self.name} refuses messages of the roles "
                f"{roles}: {error}"
            ) from None
        return cast(list[int], ids)  # what it gives for one tokenized conversation

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text = self.need_tokenizer().decode(list(ids), skip_special_tokens=True)
        return cast(str, text)  # of one row of ids

    def need_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            DFlashLabError: the target has none.
        """
        if self.tokenizer is None:
            raise DFlashLabError(
                f"the target {self.name} has no tokenizer; give token ids instead"
            )
        return self.tokenizer


def load_pair(
    name: str | None = None,
    *,
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    with_drafter: bool = True,
    thinking: bool = False,
    quiet: bool = False,
) -> Pair:
    """Load a pair by name, or from two folders or Hub repositories.

    Args:
        name: `tiny` or `smol`; None if `target` is given.
        target: folder or repository of a `transformers` causal LM.
        drafter: folder or repository of a DFlash drafter; with `name`, it replaces the
            pair's own.
        dtype: `float32` or `bfloat16`, for both models.
        device: for both models.
        with_drafter: load the drafter too.
        thinking: see `Pair`.
        quiet: no progress messages.

    Raises:
        DFlashLabError: unknown name, unreadable folder, drafter and target that do not
            fit, float16, a device that is not there.
    """
    dtype, device = as_dtype(dtype), _as_device(device)
    target = find_target(name, target, quiet)
    if name is not None and drafter is None:
        drafter = data_root() / "checkpoints" / OWN_DRAFTERS[name]
    model = load_model(target, dtype, device)
    draft_model = None
    if with_drafter and drafter is not None:
        draft_model = load_drafter(drafter, dtype, device)
    pair = Pair(
        name or str(target),
        as_target(model),
        draft_model,
        load_tokenizer(target),
        find_stop_token_ids(model),
        _prompt_sets(name),
        thinking,
    )
    if draft_model is not None:
        check_pair(draft_model, pair.target)
    return pair


def find_target(
    name: str | None, target: str | Path | None, quiet: bool = False
) -> str | Path:
    """Folder or repository of a pair's target, fetched if need be.

    Raises:
        DFlashLabError: both or neither are given, or no pair has this name.
    """
    if (name is None) == (target is None):
        raise DFlashLabError("give either the name of a pair or a target, not both")
    if target is not None:
        return target
    if name == "tiny":
        return data_root() / "checkpoints" / "tiny" / "target"
    if name == "smol":
        return smol_target_folder(quiet)
    raise DFlashLabError(
        f"unknown pair {name!r}; choose {' or '.join(PAIR_NAMES)}, or give a target "
        "and a drafter"
    )


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """`float32` or `bfloat16` by name or value; float16 is refused.

    Raises:
        DFlashLabError: any other dtype.
    """
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise DFlashLabError(
            f"dtype {str(dtype).removeprefix('torch.')!r} is not supported: use "
            "float32 or bfloat16 (float16 overflows in DFlash drafters)"
        )
    return found


def _as_device(device: str | torch.device) -> torch.device:
    try:
        device = torch.device(device)
        torch.empty(1, device=device)
        return device
    except (RuntimeError, AssertionError) as error:
        raise DFlashLabError(
            f"device {str(device)!r} cannot be used here ({first_line(error)}); use "
            "'cpu', or 'cuda' with a GPU and a CUDA build of torch"
        ) from None


def _prompt_sets(name: str | None) -> tuple[str, ...]:
    kinds = ("math", "code", "chat", "rewrite")
    return tuple(f"tiny-{kind}" for kind in kinds) if name == "tiny" else kinds


def load_model(
    source: str | Path, dtype: torch.dtype, device: torch.device, what: str = "target"
) -> PreTrainedModel:
    """A `transformers` causal LM, ready to run.

    Args:
        source: folder or Hub repository.
        dtype: of its weights.
        device: for them.
        what: the model is, for the error.

    Raises:
        DFlashLabError: it cannot be loaded, with the first line of the reason.
    """
    from transformers import AutoModelForCausalLM

    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise DFlashLabError(f"no config.json in {source}; is it a model folder?")
    try:
        with progress_bars(False):
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise DFlashLabError(
            f"cannot load the {what} {source}: {first_line(error)}"
        ) from None
    return model.to(device).eval()


def first_line(error: Exception) -> str:
    """The first line of what an exception says, which may be nothing."""
    return str(error).strip().partition("\n")[0]


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or Hub repository; None if it has none."""
    from transformers import AutoTokenizer

    # Bare models have no tokenizer, and token ids need none. For a folder without one
    # `transformers` makes up an empty tokenizer that turns every text into nothing.
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if Path(source).is_dir() and not any((Path(source) / f).exists() for f in files):
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return AutoTokenizer.from_pretrained(source)
    return None


def find_stop_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that end an answer, by the model's generation config or its config."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
    return ()
