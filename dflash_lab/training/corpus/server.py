"""Answers from a server that speaks the OpenAI chat-completions protocol.

A large target is best served by vLLM, SGLang or llama.cpp; its answers come back as
text and are turned into token ids with the pair's tokenizer. An answer whose ids do
not decode to the same text, or that ended for another reason than a stop token or the
length limit, is not what the target drew; it is left out and counted.

Leaves out: prompts that the target writes itself, which need raw completions.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from dflash_lab.errors import DFlashLabError
from dflash_lab.files import data_root
from dflash_lab.pairs.packaged_target import smol_target_folder
from dflash_lab.pairs.pair import Pair, find_stop_token_ids, load_tokenizer
from dflash_lab.training.corpus.answer_log import AnswerLog
from dflash_lab.training.corpus.corpus import (
    check_sizes,
    corpus_samplings,
    sampling_header,
)
from dflash_lab.training.corpus.parquet import require_pyarrow
from dflash_lab.training.corpus.processes import ALONE, Processes
from dflash_lab.training.corpus.prompt_sources import messages_of

# A busy or restarting server says one of these; anything else will not get better.
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}


class ChatServer:
    """A chat-completions endpoint.

    Args:
        url: such as `http://localhost:8000`, with or without `/v1`.
        model: name to ask for; the only one served if None.
        retries: how often a failed request is repeated.
        backoff: seconds before the first repetition, doubled each time.
        timeout: seconds for one answer.

    Raises:
        DFlashLabError: a bad URL, no server there, or a model that must be named.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        retries: int = 5,
        backoff: float = 1.0,
        timeout: float = 600.0,
    ):
        if not url.startswith(("http://", "https://")):
            raise DFlashLabError(
                f"server {url!r} is no URL such as http://localhost:8000"
            )
        base = url.rstrip("/")
        self.base = base if base.endswith("/v1") else f"{base}/v1"
        self.retries, self.backoff, self.timeout = retries, backoff, timeout
        self.closed = threading.Event()
        self.model = model or self._only_model()

    def ask(self, messages: Sequence[dict], **settings) -> tuple[dict, str]:
        """The assistant's message and the finish reason of one request.

        Args:
            messages: the conversation.
            **settings: further fields of the request, such as `temperature`.

        Raises:
            DFlashLabError: the server is not reachable, refuses the request, or
                answers in another protocol.
        """
        body = {"model": self.model, "messages": list(messages), **settings}
        answer = self._request("/chat/completions", body, self.retries)
        try:
            choice = answer["choices"][0]
            message, reason = choice["message"], choice["finish_reason"]
            if not isinstance(message.get("content") or "", str):
                raise TypeError
        except (LookupError, TypeError, AttributeError):
            raise self._foreign(answer) from None
        return message, reason

    def _only_model(self) -> str:
        answer = self._request("/models", None, 0)
        try:
            names = [entry["id"] for entry in answer["data"]]
        except (LookupError, TypeError):
            raise self._foreign(answer) from None
        if len(names) != 1:
            raise DFlashLabError(
                f"{self.base} serves {len(names)} models ({', '.join(names[:5])}); "
                "name one with --model"
            )
        return names[0]

    def _request(self, path: str, body: dict | None, retries: int):
        data = None if body is None else json.dumps(body).encode("utf-8")
        request = urllib.request.Request(
            self.base + path, data, {"Content-Type": "application/json"}
        )
        closed = self.closed  # the next corpus has an event of its own
        for attempt in range(retries + 1):
            wait = self.backoff * 2**attempt
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                text = error.read(500).decode("utf-8", "replace").strip()
                problem = f"answered {error.code} {error.reason}: {text}"
                if error.code not in PASSING:
                    break
                after = error.headers.get("Retry-After", "")
                wait = min(float(after), 60.0) if after.isdigit() else wait
            except ValueError:
                raise self._foreign("something that is not JSON") from None
            except (OSError, http.client.HTTPException) as error:  # refused, cut off
                problem = f"cannot be reached ({getattr(error, 'reason', error)})"
            if attempt < retries and closed.wait(wait):
                break
        raise DFlashLabError(
            f"the server {self.base} {problem}; start it or mend the request, and run "
            "the same again: it goes on from there"
        )

    def _foreign(self, answer) -> DFlashLabError:
        return DFlashLabError(
            f"{self.base} does not speak the OpenAI protocol; it sent "
            f"{str(answer)[:200]}"
        )


def tokenizer_pair(
    name: str | None, target: str | Path | None = None, thinking: bool = False
) -> Pair:
    """A pair without weights, of which only `encode` and `decode` work.

    Args:
        name: `tiny` or `smol`; None if `target` is given.
        target: folder or Hub repository with the tokenizer of what is served.
        thinking: see `Pair`.

    Raises:
        DFlashLabError: unknown name, or no tokenizer or config there.
    """
    from transformers import AutoConfig, GenerationConfig

    if (name is None) == (target is None):
        raise DFlashLabError("give either the name of a pair or a target, not both")
    if name == "tiny":
        target = data_root() / "checkpoints" / "tiny" / "target"
    elif name == "smol":
        target = smol_target_folder()
    elif name is not None:
        raise DFlashLabError(f"unknown pair {name!r}; choose tiny or smol")
    tokenizer = load_tokenizer(target)
    if tokenizer is None:
        raise DFlashLabError(f"cannot load a tokenizer from {target}")
    try:
        config = AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise DFlashLabError(f"cannot load {target}: {first_line}") from None
    try:
        generation = GenerationConfig.from_pretrained(target)
    except OSError:  # not every target has one
        generation = None
    model = SimpleNamespace(config=config, generation_config=generation)
    stop = find_stop_token_ids(model)
    return Pair(name or str(target), None, None, tokenizer, stop, (), thinking)


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
        DFlashLabError: as `write_corpus` and `ChatServer.ask`.
    """
    samplings = corpus_samplings(temperatures, top_p, top_k, seed)
    check_sizes(prompts, max_new_tokens, requests_at_once, None)
    if Path(path).suffix == ".parquet":
        require_pyarrow()
    header = {
        **header,
        "server_model": server.model,
        "stop_token_ids": list(pair.stop_token_ids),
        **sampling_header(samplings, max_new_tokens),
    }
    shared = _request_settings(pair, max_new_tokens, top_p, top_k)
    skipped: Counter = Counter()
    end = None if time_limit is None else time.monotonic() + time_limit

    def ask(index: int) -> tuple[dict, str]:
        temperature = temperatures[index % len(temperatures)]
        settings = {**shared, "temperature": temperature}
        if temperature > 0:
            settings["seed"] = (seed * 1_000_003 + index) % 2**31
        return server.ask(messages_of(prompts[index]), **settings)

    with AnswerLog(path, header, prompts, processes) as log:
        for index, (message, reason) in _answers(
            server, ask, log.todo, requests_at_once, end
        ):
            ids, problem = answer_ids(pair, message, reason)
            if problem:
                skipped[problem] += 1
                continue
            temperature = temperatures[index % len(temperatures)]
            log.add(index, ids, temperature, reason == "length")
    return len(log), skipped


def answer_ids(pair: Pair, message: dict, reason: str) -> tuple[list[int], str | None]:
    """Token ids of a served answer, or why it cannot be used.

    Args:
        pair: its tokenizer encodes the text.
        message: the assistant's message of the protocol.
        reason: its `finish_reason`.

    Returns:
        The ids, with the stop token if it ended by itself, and None; or no ids and
        the problem in a few words.
    """
    text = message.get("content") or ""
    if reason not in ("stop", "length"):
        return [], f"ended by {reason!r}"
    if message.get("reasoning_content") or message.get("reasoning"):
        return [], "thoughts split from the answer by the server"
    ids = pair.tokenizer.encode(text, add_special_tokens=False)
    back = pair.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if back != text or set(ids) & set(pair.stop_token_ids):
        return [], "not the same text after tokenisation"
    if not ids:
        return [], "empty"
    if reason == "stop" and pair.stop_token_ids:
        # Of several stop tokens the tokenizer's own one ends a chat turn.
        own = pair.tokenizer.eos_token_id
        ids.append(own if own in pair.stop_token_ids else pair.stop_token_ids[0])
    return ids, None


def _request_settings(
    pair: Pair, max_new_tokens: int, top_p: float, top_k: int
) -> dict:
    settings = {"max_tokens": max_new_tokens, "top_p": top_p}
    if top_k:
        settings["top_k"] = top_k
    # Servers think by default where the template lets them; strict ones refuse the
    # field where it means nothing.
    if "enable_thinking" in str(getattr(pair.tokenizer, "chat_template", "")):
        settings["chat_template_kwargs"] = {"enable_thinking": pair.thinking}
    return settings


def _answers(server: ChatServer, ask, todo: Sequence[int], at_once: int, end):
    """Yield (index, answer) as they come; the first error ends all."""
    closed = server.closed = threading.Event()
    tasks: queue.SimpleQueue = queue.SimpleQueue()
    results: queue.SimpleQueue = queue.SimpleQueue()
    for index in todo:
        tasks.put(index)

    def work() -> None:
        while not closed.is_set():
            try:
                index = tasks.get_nowait()
            except queue.Empty:
                return
            try:
                results.put((index, ask(index)))
            except Exception as error:  # raised again by the main thread
                results.put((index, error))
                return

    for _ in range(min(at_once, len(todo))):
        # Daemons: Ctrl-C must not wait for answers that are still being written.
        threading.Thread(target=work, daemon=True).start()
    left = len(todo)
    try:
        while left and (end is None or time.monotonic() < end):
            try:
                index, answer = results.get(timeout=0.2)
            except queue.Empty:
                continue
            if isinstance(answer, Exception):
                raise answer
            left -= 1
            yield index, answer
    finally:
        closed.set()
