"""A corpus whose answers come from a server.

Answers come as text and are turned into token ids with the pair's tokenizer; those
that are not what the target drew are left out and counted.

Leaves out: the protocol (`server.py`), and which answers are good
(`served_answers.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dflash_lab.pairs.pair import Pair
from dflash_lab.pairs.prompts import messages_of
from dflash_lab.training.corpus.answer_log import AnswerLog
from dflash_lab.training.corpus.corpus import (
    check_sizes,
    corpus_samplings,
    sampling_header,
)
from dflash_lab.training.corpus.processes import ALONE, Processes
from dflash_lab.training.corpus.served_answers import answer_ids
from dflash_lab.training.corpus.server import ChatServer


def write_corpus_from_server(
    server: ChatServer,
    pair: Pair,
    prompts: Sequence[dict],
    path: Path,
    *,
    header: dict,
    temperatures: Sequence[float] = (0.0,),
    max_new_tokens: int = 256,
    requests_at_once: int = 16,
    time_limit: float | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    processes: Processes = ALONE,
) -> tuple[int, Counter]:
    """As `write_corpus`, with the answers of a server.

    Args:
        server: serves the pair's target.
        pair: its tokenizer makes the ids; no weights are needed.
        prompts: rows of `choose_prompts`.
        path: of the corpus, resumed if it is there.
        header: what made the corpus; the server's model is added.
        temperatures: prompt i is answered at `temperatures[i % len]`.
        max_new_tokens: longest answer.
        requests_at_once: how many the server works on together.
        time_limit: seconds after which the call returns with what it has.
        top_p: passed on.
        top_k: passed on unless 0; not all servers know it.
        seed: each prompt's request gets a seed of its own made from this.
        processes: those that write this corpus together.

    Returns:
        Answers in the file, and how many answers were left out, by reason; their
        prompts are asked again by the next call.

    Raises:
        DFlashLabError: as `write_corpus` and `ChatServer.ask_all`.
    """
    samplings = corpus_samplings(temperatures, top_p, top_k, seed)
    check_sizes(prompts, max_new_tokens, requests_at_once, None)
    header = {
        **header,
        "server_model": server.model,
        "stop_token_ids": list(pair.stop_token_ids),
        **sampling_header(samplings, max_new_tokens),
    }
    shared = _request_settings(pair, max_new_tokens, top_p, top_k)
    skipped: Counter = Counter()

    def question(index: int) -> dict:
        temperature = temperatures[index % len(temperatures)]
        fields = {"messages": messages_of(prompts[index]), **shared}
        fields["temperature"] = temperature
        if temperature > 0:
            fields["seed"] = (seed * 1_000_003 + index) % 2**31
        return fields

    with AnswerLog(path, header, prompts, processes) as log:

        def take(index: int, message: dict, reason: str) -> None:
            ids, problem = answer_ids(pair, message, reason)
            if problem:
                skipped[problem] += 1
            else:
                log.add(index, ids, reason == "length")

        questions = ((index, question(index)) for index in log.todo)
        server.ask_all(questions, requests_at_once, time_limit, take)
    return len(log), skipped


def _request_settings(
    pair: Pair, max_new_tokens: int, top_p: float, top_k: int
) -> dict:
    settings: dict = {"max_tokens": max_new_tokens, "top_p": top_p}
    if top_k:
        settings["top_k"] = top_k
    # Servers think by default where the template lets them; strict ones refuse the
    # field where it means nothing.
    if "enable_thinking" in str(getattr(pair.tokenizer, "chat_template", "")):
        settings["chat_template_kwargs"] = {"enable_thinking": pair.thinking}
    return settings
