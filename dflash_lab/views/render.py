"""HTML out of templates; what a value holds can never become markup.

Templates and style sheets lie in the folders `templates` of the rooms that show them.
Every value is escaped, except what functions here and `| safe` in a template mark as
HTML already: marked tokens, chips, style sheets, bodies of notebooks.

Leaves out: what is on a page.
"""

from __future__ import annotations

import base64
import math
from functools import cache
from typing import TYPE_CHECKING

from dflash_lab.views.style import STATES, resource, token_css
from dflash_lab.views.tokens import html_chip, html_tokens, marked_drafts, own_token

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values) -> str:
    """A template, filled in.

    Args:
        template: named as for `style.resource`, such as `views/report.html`.
        values: what it asks for; a value that is missing is an error.
    """
    return _environment().get_template(template).render(values)


def known(value) -> bool:
    """Whether there is a number: neither None nor NaN."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def count(number: int, noun: str) -> str:
    """Such as `1 token`, `2 tokens`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=FunctionLoader(resource),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.globals |= {
        "chip": lambda pair, decode: Markup(html_chip(pair[0], pair[1], decode)),
        "tokens": lambda pairs, decode: Markup(html_tokens(pairs, decode)),
        "token_css": lambda root=":root": Markup(token_css(root)),
        "css": lambda name: Markup(resource(name)),
        "count": count,
        "marked_drafts": marked_drafts,
        "own_token": own_token,
        "styles": STATES,
    }
    made.tests["known"] = known
    made.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    return made
