"""A server that speaks the OpenAI chat-completions protocol.

A large target is best served by vLLM, SGLang or llama.cpp. A busy or restarting server
is asked again, after pauses that double.

Leaves out: token ids (`served_answers.py`), and prompts that the target writes itself,
which need raw completions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import anyio
import httpx2
from anyio.from_thread import start_blocking_portal

from dflash_lab.errors import DFlashLabError

# A busy or restarting server says one of these; anything else will not get better.
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
# Seconds for one answer, and the longest pause that a server may ask for.
TIMEOUT, LONGEST_PAUSE = 600.0, 60.0


class ChatServer:
    """A chat-completions endpoint.

    Args:
        url: such as `http://localhost:8000`, with or without `/v1`.
        model: name to ask for; the only one served if None.
        retries: how often a failed request is repeated.
        backoff: seconds before the first repetition, doubled each time.

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
    ):
        try:
            if httpx2.URL(url).scheme not in ("http", "https"):
                raise httpx2.InvalidURL(url)
        except httpx2.InvalidURL:
            raise DFlashLabError(
                f"server {url!r} is no URL such as http://localhost:8000"
            ) from None
        base = url.rstrip("/")
        self.base = base if base.endswith("/v1") else f"{base}/v1"
        self.retries, self.backoff = retries, backoff
        self.model = model or self._only_model()

    def ask_all(
        self,
        questions: Iterable[tuple[int, dict]],
        at_once: int,
        time_limit: float | None,
        take: Callable[[int, dict, str], None],
    ) -> None:
        """Ask until all is answered or the time is up; the first error ends all.

        Args:
            questions: a number, and the request's fields but for the model.
            at_once: how many the server works on together.
            time_limit: seconds; answers still being written then are given up.
            take: called with a question's number, the assistant's message and the
                finish reason.

        Raises:
            DFlashLabError: the server is not reachable, refuses a request, or answers
                in another protocol.
        """
        waiting = iter(questions)

        async def work(client: httpx2.AsyncClient) -> None:
            for number, fields in waiting:
                take(number, *await self._ask(client, fields))

        async def run() -> None:
            client = httpx2.AsyncClient(timeout=TIMEOUT, follow_redirects=True)
            with anyio.move_on_after(time_limit):
                async with client, anyio.create_task_group() as group:
                    for _ in range(at_once):
                        group.start_soon(work, client)

        try:
            # In a thread of its own, because a notebook's has a loop already. Leaving,
            # by Ctrl-C too, gives up the answers that are still being written.
            with start_blocking_portal() as portal:
                portal.call(run)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _ask(self, client: httpx2.AsyncClient, fields: dict) -> tuple[dict, str]:
        body = {"model": self.model, **fields}
        for attempt in itertools.count():
            try:
                reply = await client.post(f"{self.base}/chat/completions", json=body)
                reply.raise_for_status()
                break
            except httpx2.HTTPError as error:
                pause = self._pause(error, attempt)
                if pause is None:
                    raise self._failed(error) from None
            await anyio.sleep(pause)
        try:
            choice = reply.json()["choices"][0]
            message, reason = choice["message"], choice["finish_reason"]
            if not isinstance(message.get("content") or "", str):
                raise TypeError
        except (ValueError, LookupError, TypeError, AttributeError):
            raise self._foreign(reply) from None
        return message, reason

    def _pause(self, error: httpx2.HTTPError, attempt: int) -> float | None:
        """Seconds before the next attempt; None if there should be none."""
        if attempt == self.retries:
            return None
        pause = self.backoff * 2**attempt
        if not isinstance(error, httpx2.HTTPStatusError):
            return pause
        if error.response.status_code not in PASSING:
            return None
        after = error.response.headers.get("Retry-After", "")
        return min(float(after), LONGEST_PAUSE) if after.isdecimal() else pause

    def _only_model(self) -> str:
        try:
            reply = httpx2.get(
                f"{self.base}/models", timeout=TIMEOUT, follow_redirects=True
            )
            reply.raise_for_status()
        except httpx2.HTTPError as error:
            raise self._failed(error) from None
        try:
            names = [entry["id"] for entry in reply.json()["data"]]
        except (ValueError, LookupError, TypeError):
            raise self._foreign(reply) from None
        if len(names) != 1:
            raise DFlashLabError(
                f"{self.base} serves {len(names)} models ({', '.join(names[:5])}); "
                "name one with --model"
            )
        return names[0]

    def _failed(self, error: httpx2.HTTPError) -> DFlashLabError:
        problem = f"cannot be reached ({str(error) or type(error).__name__})"
        if isinstance(error, httpx2.HTTPStatusError):
            reply = error.response
            text = reply.text[:500].strip()
            problem = f"answered {reply.status_code} {reply.reason_phrase}: {text}"
        return DFlashLabError(
            f"the server {self.base} {problem}; start it or mend the request, and run "
            "the same again: it goes on from there"
        )

    def _foreign(self, reply: httpx2.Response) -> DFlashLabError:
        return DFlashLabError(
            f"{self.base} does not speak the OpenAI protocol; it sent "
            f"{reply.text[:200]!r}"
        )
