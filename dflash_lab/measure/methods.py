"""Ways of decoding by name, all with the same question and the same kind of answer.

Our loop with one proposer or another, and what users of `transformers` have: plain
`generate`, prompt lookup, a small assistant model, and its own DFlash loop with our
drafter. Every method is greedy or samples at one temperature, and ends where the
target's stop tokens say.

Leaves out: measuring (`bench.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_lab.baselines.assistant import is_assistant, load_assistant
from dflash_lab.baselines.eagle import EagleHead
from dflash_lab.baselines.eagle_proposer import Eagle
from dflash_lab.baselines.medusa import MedusaHeads
from dflash_lab.baselines.medusa_proposer import Medusa
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.files import data_root
from dflash_lab.interop.hf_assistant import as_hf_assistant
from dflash_lab.pairs.pair import Pair
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.ngram import NGramLookup
from dflash_lab.speculative.proposer import DFlash, Plain, Proposer
from dflash_lab.speculative.sampling import Sampling
from dflash_lab.speculative.trace import DecodeTrace

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Answer:
    """What a method returned for one prompt.

    Attributes:
        ids: new ids.
        seconds: wall clock, prefill included, the device idle before and after.
        first_token: seconds until the first token; None where a method does not say.
        trace: cycles; None for methods of `transformers`.
        interrupted: whether Ctrl-C cut it.
    """

    ids: list[int]
    seconds: float
    first_token: float | None = None
    trace: DecodeTrace | None = None
    interrupted: bool = False

    @property
    def cycles(self) -> DecodeTrace:
        """The trace of a method that has one."""
        assert self.trace is not None
        return self.trace


@dataclass(frozen=True)
class MethodSettings:
    """What all methods of a run share.

    Attributes:
        max_new_tokens: per answer.
        temperature: 0 for greedy.
        seed: of sampling.
        block_size: of DFlash and of lookup; as trained, or 8, if None.
        assistant: folder or Hub name of the small model of `hf_assisted`; the pair's
            own if None.
        eagle: folder of an EAGLE-3-style head; the pair's own if None.
        medusa: folder of Medusa-style heads; the pair's own if None.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    block_size: int | None = None
    assistant: str | None = None
    eagle: str | None = None
    medusa: str | None = None


_TRAIN = {
    "assistant": "python -m dflash_lab.baselines.assistant_training --help",
    "eagle": "python -m dflash_lab.baselines.eagle_training --help",
    "medusa": "train_medusa, docs/training.md has an example",
}

Method = Callable[[Sequence[int]], Answer]

# name -> (what it is, our loop or not)
METHODS = {
    "ar": "plain decoding by our loop",
    "dflash": "DFlash by our loop",
    "dflash_compiled": "DFlash by our loop, the cycle compiled",
    "ngram": "n-gram lookup by our loop",
    "eagle": "an EAGLE-3-style head by our loop, a chain of drafts",
    "medusa": "Medusa-style heads by our loop, each drafts alone",
    "hf_generate": "model.generate",
    "hf_lookup": "generate with prompt lookup",
    "hf_assisted": "generate with a small assistant model",
    "hf_dflash": "transformers' own DFlash loop, our drafter",
}


def make_method(name: str, pair: Pair, settings: MethodSettings) -> Method:
    """A method by name.

    Raises:
        DFlashLabError: an unknown name, or something that the method needs is missing.
    """
    if name not in METHODS:
        raise DFlashLabError(
            f"unknown method {name!r}; choose among {', '.join(METHODS)}"
        )
    if name == "ar":
        return loop_method(pair, Plain(), settings)
    if name == "ngram":
        return loop_method(pair, NGramLookup(settings.block_size or 8), settings)
    if name == "eagle":
        return loop_method(pair, _eagle(pair, settings), settings)
    if name == "medusa":
        return loop_method(pair, _medusa(pair, settings), settings)
    if name.startswith("dflash"):
        proposer = DFlash(_need_drafter(pair, name), settings.block_size)
        return loop_method(pair, proposer, settings, compile=name == "dflash_compiled")
    options: dict = {}
    if name == "hf_lookup":
        options = {"prompt_lookup_num_tokens": (settings.block_size or 8) - 1}
    elif name == "hf_assisted":
        options = {"assistant_model": _assistant(pair, settings)}
    elif name == "hf_dflash":
        drafter = _need_drafter(pair, name)
        if settings.block_size not in (None, drafter.config.block_size):
            raise DFlashLabError(
                f"hf_dflash drafts blocks as trained, not of {settings.block_size}; "
                "leave the method or the block size out"
            )
        assistant = as_hf_assistant(drafter)
        options = {"assistant_model": assistant, "speculation_type": "dflash"}
    return generate_method(pair, settings, **options)


def loop_method(
    pair: Pair,
    proposer: Proposer,
    settings: MethodSettings,
    *,
    compile: bool = False,
    strict: bool = False,
) -> Method:
    """Decoding by our loop; `compile` and `strict` as in `speculative_generate`."""
    sampling = Sampling(settings.temperature, seed=settings.seed)

    def decode(ids: Sequence[int]) -> Answer:
        result = speculative_generate(
            pair.target,
            proposer,
            list(ids),
            max_new_tokens=settings.max_new_tokens,
            sampling=sampling,
            stop_token_ids=pair.stop_token_ids,
            strict=strict,
            compile=compile,
        )
        return Answer(
            result.output_ids[0],
            result.seconds,
            result.time_to_first_token,
            result.trace,
            result.stop_reasons[0] == "interrupted",
        )

    return decode


def generate_method(pair: Pair, settings: MethodSettings, **extra) -> Method:
    """Decoding by `model.generate`, with further arguments."""
    stops = list(pair.stop_token_ids)
    options: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": settings.temperature > 0,
        "repetition_penalty": 1.0,  # our loop applies none either
        "eos_token_id": stops or None,
        "pad_token_id": stops[0] if stops else 0,
        **extra,
    }
    if settings.temperature > 0:
        options |= {"temperature": settings.temperature, "top_k": 0, "top_p": 1.0}

    def decode(ids: Sequence[int]) -> Answer:
        device = pair.target.device
        inputs = torch.tensor([list(ids)], device=device)
        with torch.inference_mode(), torch.random.fork_rng():
            # generate draws from the default generator; its state is put back after.
            own = torch.Generator().manual_seed(settings.seed)
            torch.set_rng_state(own.get_state())
            _wait(device)
            started = time.perf_counter()
            model: Any = pair.model
            output = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), **options
            )
            _wait(device)
            seconds = time.perf_counter() - started
        return Answer(output[0, len(ids) :].tolist(), seconds)

    return decode


def _need_drafter(pair: Pair, method: str) -> DFlashDraftModel:
    if pair.drafter is None:
        raise DFlashLabError(f"method {method} needs a drafter; give --drafter")
    return pair.drafter


def _eagle(pair: Pair, settings: MethodSettings) -> Eagle:
    folder = settings.eagle or _own_folder(pair, "eagle", "EAGLE-style head comes")
    head = EagleHead.from_pretrained(folder, pair.target.dtype)
    return Eagle(head.to(pair.target.device), settings.block_size or 8)


def _medusa(pair: Pair, settings: MethodSettings) -> Medusa:
    folder = settings.medusa or _own_folder(pair, "medusa", "Medusa-style heads come")
    heads = MedusaHeads.from_pretrained(folder, pair.target.dtype)
    return Medusa(heads.to(pair.target.device), settings.block_size)


def _own_folder(pair: Pair, name: str, what: str) -> Path:
    folder = data_root() / "checkpoints" / f"{pair.name}-{name}"
    if not folder.is_dir():
        raise DFlashLabError(
            f"no {what} with {pair.name}; train one ({_TRAIN[name]}) and give its "
            f"folder as --{name}, or leave the method out"
        )
    return folder


def _assistant(pair: Pair, settings: MethodSettings) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    source = settings.assistant or _own_folder(pair, "assistant", "assistant comes")
    model: Any
    if is_assistant(source):
        model = load_assistant(source, pair.target)
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=pair.target.dtype
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise DFlashLabError(
                f"cannot load the assistant {source}: {first}"
            ) from None
        rows = model.get_input_embeddings().weight.shape[0]
        if rows != pair.target.embedding_table.shape[0]:
            raise DFlashLabError(
                f"the assistant {source} has {rows} embedding rows, the target "
                f"{pair.target.embedding_table.shape[0]}; both must share a tokenizer"
            )
    # A constant number of drafts, as the other methods have.
    model.generation_config.num_assistant_tokens = (settings.block_size or 8) - 1
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model.to(pair.target.device).eval()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
