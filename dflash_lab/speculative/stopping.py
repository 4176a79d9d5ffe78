"""When a row of a generation ends, decided token by token.

A block can hold a stop token, a stop string and the length limit in any order. The
rules are asked after every single token, as plain decoding would, so the text is cut
exactly where plain decoding ends. Stop strings are judged by the criterion of
`transformers`.

Leaves out: minimum lengths (a logits processor does that) and criteria that look at
scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import StopStringCriteria

from dflash_lab.errors import DFlashLabError


class StopRules:
    """Stop tokens, stop strings and length limits of a generation.

    Args:
        stop_token_ids: the first of these ends a row; it is kept.
        stop_strings: text that ends a row; the token that completes it is kept.
        tokenizer: needed for stop strings.
        criteria: `transformers` stopping criteria, asked after every token with the
            ids so far and None for the scores.
    """

    def __init__(
        self,
        stop_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        tokenizer=None,
        criteria: Sequence[Callable] = (),
    ):
        if isinstance(stop_strings, str):
            stop_strings = [stop_strings]
        if isinstance(stop_token_ids, int):
            stop_token_ids = [stop_token_ids]
        self.stop_token_ids = frozenset(stop_token_ids)
        self._strings = None
        if stop_strings:
            if tokenizer is None:
                raise DFlashLabError(
                    "stop_strings need the tokenizer that turns tokens into text; pass "
                    "tokenizer=..., or use stop_token_ids"
                )
            self._strings = StopStringCriteria(tokenizer, list(stop_strings))
        self.criteria = list(criteria)

    @property
    def look_at_text(self) -> bool:
        """Whether more than stop tokens and length ends a row."""
        return self._strings is not None or bool(self.criteria)

    def reason(
        self, prompt: Sequence[int], output: Sequence[int], budget: int
    ) -> str | None:
        """Why the row ends with its latest token, or None if it goes on.

        Args:
            prompt: ids of the prompt.
            output: ids so far, the latest last.
            budget: most output tokens this row may have.

        Returns:
            `"stop_token"`, `"stop_string"`, `"criterion"`, `"length"` or None.
        """
        if output[-1] in self.stop_token_ids:
            return "stop_token"
        if self._strings is not None:
            ids = torch.tensor([[*prompt, *output]])
            if bool(self._strings(ids, None)[0]):
                return "stop_string"
        if self.criteria:
            ids = torch.tensor([[*prompt, *output]])
            if any(bool(torch.as_tensor(c(ids, None)).all()) for c in self.criteria):
                return "criterion"
        return "length" if len(output) >= budget else None
