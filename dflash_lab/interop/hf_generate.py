"""Our loop behind `model.generate`, with the arguments people know.

    model.generate(**inputs, custom_generate=custom_generate(drafter))

`generate` prepares everything as always: generation config, processors, stopping
criteria. The usual warpers, end-of-text tokens and length limits go to the fast loop;
any other processor or criterion is applied exactly, token by token, by the host loop.

Two traps of `generate`. It does not pass a streamer on: give it to `custom_generate`
instead. And what it samples with `do_sample=True` follows the same distribution as
without us,
but the draws are ours: position-keyed noise, seeded from torch's default generator.

Leaves out: beam search, contrastive search, encoder-decoder models, hidden states and
attentions in the output; each is refused with a sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.generation import GenerationResult
from dflash_lab.speculative.proposer import DFlash, Proposer
from dflash_lab.speculative.sampling import Sampling
from dflash_lab.target.fused import as_target
from dflash_lab.target.target import Target

# In the order in which `Sampling` applies them.
WARPERS = (
    (TemperatureLogitsWarper, "temperature"),
    (TopKLogitsWarper, "top_k"),
    (TopPLogitsWarper, "top_p"),
)


def custom_generate(
    drafter: DFlashDraftModel | Proposer,
    *,
    streamer=None,
    on_result: Callable[[GenerationResult], None] | None = None,
) -> Callable:
    """A function for `generate(custom_generate=...)`.

    Args:
        drafter: a drafter, or any proposer.
        streamer: a `transformers` streamer; gets the prompt, exactly the returned
            tokens, and the end.
        on_result: gets the result with its trace before `generate` returns.

    Returns:
        The function. It keeps the last model it saw in the form that decodes, so use
        one function for many calls.
    """
    proposer = DFlash(drafter) if isinstance(drafter, DFlashDraftModel) else drafter
    return _Decode(proposer, streamer, on_result)


class _Decode:
    """What `generate` calls in place of its own loop."""

    def __init__(
        self,
        proposer: Proposer,
        streamer,
        on_result: Callable[[GenerationResult], None] | None,
    ):
        self.proposer, self.streamer, self.on_result = proposer, streamer, on_result
        self.target: Target | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor=None,
        stopping_criteria=None,
        generation_config=None,
        **model_kwargs,
    ):
        config, streamer = generation_config, self.streamer
        _refuse_what_is_left_out(model, config, input_ids, streamer)
        if self.target is None or self.target.model is not model:
            self.target = as_target(model)
        sampling, processors = _split_processors(
            list(logits_processor or ()), config.do_sample
        )
        stops, budget, criteria = _split_criteria(
            list(stopping_criteria or ()), input_ids.shape[1]
        )
        prompts = _without_padding(input_ids, model_kwargs.get("attention_mask"))
        seeds = [0] * len(prompts)
        if config.do_sample:
            seeds = torch.randint(2**62, (len(prompts),)).tolist()
        if streamer is not None:
            streamer.put(input_ids.cpu())
        scores = config.return_dict_in_generate and (
            config.output_scores or config.output_logits
        )
        result = speculative_generate(
            self.target,
            self.proposer,
            prompts,
            max_new_tokens=budget,
            sampling=sampling,
            seeds=seeds,
            stop_token_ids=stops,
            logits_processor=processors,
            stopping_criteria=criteria,
            output_scores=bool(scores),
            on_tokens=None if streamer is None else self._stream,
        )
        if streamer is not None:
            streamer.end()
        if self.on_result is not None:
            self.on_result(result)
        return _as_output(result, input_ids, config)

    def _stream(self, row: int, ids: list[int]) -> None:
        for token in ids:
            self.streamer.put(torch.tensor([token]))


def _refuse_what_is_left_out(model, config, input_ids: Tensor, streamer) -> None:
    wrong = None
    if getattr(model.config, "is_encoder_decoder", False):
        wrong = "an encoder-decoder model"
    elif (config.num_beams or 1) > 1:
        wrong = f"num_beams={config.num_beams}"
    elif config.output_hidden_states or config.output_attentions:
        wrong = "output_hidden_states or output_attentions"
    elif input_ids.shape[1] == 0:
        wrong = "inputs_embeds without input_ids"
    elif len(input_ids) > 1 and (config.output_scores or config.output_logits):
        wrong = f"output_scores or output_logits for {len(input_ids)} prompts at once"
    elif len(input_ids) > 1 and streamer is not None:
        wrong = f"a streamer for {len(input_ids)} prompts at once"
    if wrong:
        raise DFlashLabError(
            f"speculative decoding does not serve {wrong}; leave it out, or call "
            "generate without custom_generate"
        )


def _split_processors(processors: list, sample: bool) -> tuple[Sampling, list]:
    """The usual warpers as a `Sampling`; everything as processors otherwise."""
    if not sample:
        return Sampling(), processors
    values, rest = {}, list(processors)
    for kind, name in WARPERS:
        if rest and type(rest[0]) is kind:
            values[name] = getattr(rest.pop(0), name)
    if not rest:
        return Sampling(**{"temperature": 1.0, **values}), []
    return Sampling(temperature=1.0), processors


def _split_criteria(criteria: list, length: int) -> tuple[list[int], int, list]:
    """Stop ids, budget of new tokens, and the criteria that are neither."""
    stops, budget, rest = [], None, []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            limit = criterion.max_length - length
            budget = limit if budget is None else min(budget, limit)
        elif type(criterion) is EosTokenCriteria:
            stops += torch.as_tensor(criterion.eos_token_id).flatten().tolist()
        else:
            rest.append(criterion)
    if budget is None:
        raise DFlashLabError("generate set no length limit; pass max_new_tokens")
    return stops, budget, rest


def _without_padding(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    if mask is None:
        return input_ids.tolist()
    return [
        row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True)
    ]


def _as_output(result: GenerationResult, input_ids: Tensor, config):
    longest = max(map(len, result.output_ids))
    pad = config.pad_token_id
    if pad is None and min(map(len, result.output_ids)) < longest:
        raise DFlashLabError("rows end at different lengths; pass pad_token_id")
    shape = (len(input_ids), longest)
    answers = input_ids.new_full(shape, 0 if pad is None else pad)
    for row, ids in enumerate(result.output_ids):
        answers[row, : len(ids)] = torch.tensor(ids, device=answers.device)
    sequences = torch.cat([input_ids, answers], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    kept: dict[str, Any] = {}
    if result.scores is not None and config.output_scores:
        kept["scores"] = tuple(x[None] for x in result.scores[0])
    if result.logits is not None and config.output_logits:
        kept["logits"] = tuple(x[None].float() for x in result.logits[0])
    return GenerateDecoderOnlyOutput(sequences=cast(Any, sequences), **kept)
