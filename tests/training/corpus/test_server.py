"""Answers that a server writes are the target's own, or are left out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest
from reference import generate_greedily

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.corpus.corpus import write_corpus
from dflash_lab.training.corpus.corpus_file import (
    read_corpus,
)
from dflash_lab.training.corpus.prompt_sources import (
    choose_prompts,
    generated_prompts,
)
from dflash_lab.training.corpus.served_answers import answer_ids, tokenizer_pair
from dflash_lab.training.corpus.server import ChatServer
from dflash_lab.training.corpus.server_corpus import write_corpus_from_server

TINY = ["--pair", "tiny", "--prompts", "generator", "--threads", "1"]


class Handler(BaseHTTPRequestHandler):
    """Answers with the tiny target's greedy text, after some trouble."""

    def log_message(self, *arguments):
        pass

    def reply(self, code, value, headers=()):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        for name, text in headers:
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data)))
        with contextlib.suppress(OSError):  # whoever asked may have left
            self.end_headers()
            self.wfile.write(data)

    def do_GET(self):
        assert self.path == "/v1/models"
        self.reply(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            trouble = self.server.trouble.pop(0) if self.server.trouble else None
        if trouble:
            return self.reply(*trouble)
        text, reason = self.server.answers(body)
        choice = {"message": {"content": text}, "finish_reason": reason}
        return self.reply(200, {"choices": [choice]})


@pytest.fixture
def served(tiny, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.models, server.bodies, server.trouble = ["tiny-served"], [], []
    server.lock = threading.Lock()
    server.url = f"http://127.0.0.1:{server.server_port}"

    def answers(body):
        ids = tiny.encode_messages(body["messages"])
        with server.lock:
            made = generate_greedily(tiny.target, ids, body["max_tokens"], [0])
        return tiny.decode(made), "stop" if made[-1] == 0 else "length"

    server.answers = answers
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def serve_settings():
    return {"header": {"target": "tiny"}, "max_new_tokens": 40, "requests_at_once": 3}


def test_a_server_gives_the_ids_that_the_target_draws(tmp_path, tiny, served):
    pair = tokenizer_pair("tiny")
    assert pair.stop_token_ids == tiny.stop_token_ids and pair.target is None
    prompts, _ = choose_prompts(generated_prompts(pair, 0), pair, count=8)
    path, own = tmp_path / "corpus.jsonl", tmp_path / "own.jsonl"
    served.trouble = [(503, {"error": "busy"}), (429, b""), (500, b"")]
    server = ChatServer(served.url, backoff=0.01)
    assert server.model == "tiny-served"
    done, skipped = write_corpus_from_server(
        server, pair, prompts[:5], path, **serve_settings()
    )
    assert (done, skipped) == (5, {}) and len(served.bodies) == 5 + 3
    served.bodies.clear()
    write_corpus_from_server(server, pair, prompts, path, **serve_settings())
    asked = [body["messages"][0]["content"] for body in served.bodies]
    assert sorted(asked) == sorted(p["prompt"] for p in prompts[5:])  # only new ones
    assert served.bodies[0]["model"] == "tiny-served"
    assert "chat_template_kwargs" not in served.bodies[0]
    write_corpus(
        tiny.target, prompts, own, stop_token_ids=[0], header={}, max_new_tokens=40
    )
    # The same text, the same stop; the tokenizer may cut it otherwise than the target.
    rows, twins = read_corpus(path)[1], read_corpus(own)[1]
    for row, twin in zip(rows, twins, strict=True):
        assert tiny.decode(row["answer_ids"]) == tiny.decode(twin["answer_ids"])
        assert row["answer_ids"][-1:] == [0] or row["truncated"]
        assert row["truncated"] == twin["truncated"]
        assert row["prompt_ids"] == twin["prompt_ids"]
    with pytest.raises(DFlashLabError, match="server_model was 'tiny-served'"):
        write_corpus_from_server(
            ChatServer(served.url, "x"), pair, prompts, path, **serve_settings()
        )


def test_sampling_and_thinking_reach_the_server(tmp_path, served):
    pair = tokenizer_pair("tiny", thinking=True)
    pair.tokenizer.chat_template += "{# enable_thinking #}"
    prompts, _ = choose_prompts(generated_prompts(pair, 0), pair, count=4)
    served.answers = lambda body: ("ok", "stop")
    write_corpus_from_server(
        ChatServer(served.url + "/v1/"),
        pair,
        prompts,
        tmp_path / "corpus.jsonl",
        temperatures=(0.0, 0.7),
        top_p=0.9,
        top_k=20,
        seed=1,
        **serve_settings(),
    )
    bodies = {body["messages"][0]["content"]: body for body in served.bodies}
    bodies = [bodies[prompt["prompt"]] for prompt in prompts]
    assert [body["temperature"] for body in bodies] == [0.0, 0.7, 0.0, 0.7]
    assert all(
        (b["top_p"], b["top_k"], b["max_tokens"]) == (0.9, 20, 40) for b in bodies
    )
    assert bodies[0]["chat_template_kwargs"] == {"enable_thinking": True}
    assert "seed" not in bodies[0] and bodies[1]["seed"] != bodies[3]["seed"]
    rows = read_corpus(tmp_path / "corpus.jsonl")[1]
    assert [row["temperature"] for row in rows] == [0.0, 0.7, 0.0, 0.7]


def test_answers_that_are_not_the_targets_own_are_counted(tmp_path, served):
    pair = tokenizer_pair("tiny")
    prompts, _ = choose_prompts(generated_prompts(pair, 0), pair, count=5)
    replies = [
        *(("fine", "stop"), ("cut", "length"), ("bad", "content_filter")),
        *(("", "stop"), ("a<|end|>b", "stop")),
    ]
    replies = dict(zip((p["prompt"] for p in prompts), replies, strict=True))
    served.answers = lambda body: replies[body["messages"][0]["content"]]
    path = tmp_path / "corpus.jsonl"
    done, skipped = write_corpus_from_server(
        ChatServer(served.url), pair, prompts, path, **serve_settings()
    )
    assert done == 2 and skipped == {
        "ended by 'content_filter'": 1,
        "empty": 1,
        "not the same text after tokenisation": 1,
    }
    assert [row["truncated"] for row in read_corpus(path)[1]] == [False, True]
    thought = {"content": "yes", "reasoning_content": "hm"}
    assert "thoughts" in answer_ids(pair, thought, "stop")[1]
    # A tokenizer that loses something.
    plain = pair.tokenizer.encode
    pair.tokenizer.encode = lambda text, **kwargs: plain(text, **kwargs)[:-1]
    assert "not the same" in answer_ids(pair, {"content": "fine"}, "stop")[1]


def test_trouble_with_a_server_is_one_error_each(tmp_path, served):
    pair = tokenizer_pair("tiny")
    prompts, _ = choose_prompts(generated_prompts(pair, 0), pair, count=6)
    path = tmp_path / "corpus.jsonl"
    arguments = (pair, prompts, path)
    # One at a time: no other request may take the trouble that is meant for the next.
    settings = {**serve_settings(), "requests_at_once": 1}
    patient = ChatServer(served.url, retries=1, backoff=0.01)
    served.trouble = [(503, b"loading")] * 20
    with pytest.raises(DFlashLabError, match=r"answered 503.*loading"):
        write_corpus_from_server(patient, *arguments, **settings)
    served.trouble = [(400, b"too long")]
    with pytest.raises(DFlashLabError, match=r"answered 400.*too long"):
        write_corpus_from_server(patient, *arguments, **settings)
    served.trouble = [(200, b"<html>")]
    with pytest.raises(DFlashLabError, match="not speak the OpenAI protocol"):
        write_corpus_from_server(patient, *arguments, **settings)
    served.trouble = [(200, {"choices": []})]
    with pytest.raises(DFlashLabError, match="not speak the OpenAI protocol"):
        write_corpus_from_server(patient, *arguments, **settings)
    done, _ = write_corpus_from_server(patient, *arguments, **settings)
    assert done == 6  # what came before each trouble was kept, the rest was asked
    served.models = ["a", "b"]
    with pytest.raises(DFlashLabError, match="serves 2 models"):
        ChatServer(served.url)
    with pytest.raises(DFlashLabError, match="no URL"):
        ChatServer("localhost:8000")


def one_answer(served, path, retries=1, backoff=60.0, **settings):
    pair = tokenizer_pair("tiny")
    prompts, _ = choose_prompts(generated_prompts(pair, 0), pair, count=1)
    server = ChatServer(served.url, retries=retries, backoff=backoff)
    settings = {**serve_settings(), **settings}
    return write_corpus_from_server(server, pair, prompts, path, **settings)


def test_the_server_says_when_to_ask_again(tmp_path, served):
    served.answers = lambda body: ("fine", "stop")
    served.trouble = [(429, b"", [("Retry-After", "0")])]
    started = time.monotonic()
    assert one_answer(served, tmp_path / "corpus.jsonl")[0] == 1
    assert time.monotonic() - started < 30
    assert len(served.bodies) == 2


def test_pauses_double_and_have_a_limit():
    server = ChatServer("http://localhost:1", "model", retries=3, backoff=2.0)

    def pause(attempt, code=503, **headers):
        request = httpx2.Request("POST", server.base)
        reply = httpx2.Response(code, headers=headers, request=request)
        error = httpx2.HTTPStatusError("", request=request, response=reply)
        return server._pause(error, attempt)

    assert [pause(attempt) for attempt in range(4)] == [2.0, 4.0, 8.0, None]
    assert pause(0, 429) == pause(0, 500) == 2.0
    assert pause(0, 400) is pause(0, 404) is pause(0, 501) is None
    waits = ("7", "3600", "Wed, 21 Oct 2026 07:28:00 GMT")
    assert [pause(0, **{"Retry-After": wait}) for wait in waits] == [7.0, 60.0, 2.0]
    assert server._pause(httpx2.ReadTimeout(""), 1) == 4.0


def test_nothing_waits_for_answers_that_nobody_wants_any_more(tmp_path, served):
    never = threading.Event()

    def answers(body):
        if body["max_tokens"] == 1:
            os.kill(os.getpid(), signal.SIGINT)
        never.wait(60)
        return "late", "stop"

    served.answers = answers
    path = tmp_path / "corpus.jsonl"
    started = time.monotonic()
    assert one_answer(served, path, time_limit=0.2) == (0, {})
    # While a pause lasts, too.
    served.trouble = [(503, b"")]
    assert one_answer(served, path, time_limit=0.2) == (0, {})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            one_answer(served, tmp_path / "other.jsonl", max_new_tokens=1)
    finally:
        signal.signal(signal.SIGINT, before)
        never.set()
    assert time.monotonic() - started < 30


def test_a_notebook_can_ask_a_server(tmp_path, served):
    async def cell():
        return one_answer(served, tmp_path / "corpus.jsonl")

    served.answers = lambda body: ("fine", "stop")
    assert asyncio.run(cell()) == (1, {})


def test_no_server_there(tmp_path, monkeypatch, run_command):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        path = str(tmp_path / "corpus.jsonl")
        with pytest.raises(DFlashLabError, match="cannot be reached"):
            run_command([*TINY, "--server", url, "--out", path])


def test_command_with_a_server_loads_no_weights(
    tmp_path, served, monkeypatch, capsys, run_command
):
    monkeypatch.setattr("dflash_lab.pairs.pair.load_pair", None)
    path = tmp_path / "corpus.jsonl"
    arguments = [*TINY, "--num-prompts", "3", "--max-new-tokens", "20"]
    assert run_command([*arguments, "--server", served.url, "--out", str(path)]) == 0
    header, rows = read_corpus(path)
    assert header["server_model"] == "tiny-served" and len(rows) == 3
    assert "3 answers to 3 prompts" in capsys.readouterr().out
