"""A small world in simple English, for the tiny target to learn.

The `tiny` pair needs a language that a model of two million parameters learns in
minutes, with the same four kinds of task as the real prompt sets: sums told as stories,
small functions, animals to ask about, and lists to rewrite. Every text is a prompt and
an answer; answers follow rules with room for choice, so that a target has preferences
of its own which a drafter must learn from the target, not from the grammar.

Held-out prompts are those whose hash falls in a fixed tenth; training never draws them.

Leaves out: the tokenizer and the models (`training/run/tiny.py`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

KINDS = ("math", "code", "chat", "rewrite")

_NAMES, _FRUIT, _WORDS = map(
    str.split,
    (
        "Mia Tom Ana Ben Lily Sam Eva Max Zoe Leo Ida Finn",
        "apples pears plums figs nuts shells stones cards coins stamps",
        "anchor basket candle desk engine feather garden hammer island jacket kettle "
        "ladder mirror needle orange pencil quilt ribbon saddle table umbrella valley "
        "window yarn",
    ),
)
_ANIMALS = {
    "fox": ("red", "mice", "forest", "quick"),
    "owl": ("brown", "mice", "old barn", "quiet"),
    "frog": ("green", "flies", "pond", "small"),
    "bear": ("black", "honey", "cave", "strong"),
    "swan": ("white", "grass", "lake", "proud"),
    "crab": ("orange", "seaweed", "beach", "careful"),
    "goat": ("grey", "leaves", "hill", "stubborn"),
    "mole": ("dark", "worms", "garden", "busy"),
    "seal": ("silver", "fish", "bay", "playful"),
    "crow": ("black", "seeds", "tall tree", "clever"),
    "hare": ("brown", "clover", "meadow", "fast"),
    "duck": ("yellow", "snails", "river", "cheerful"),
}
_VARIABLES = ["x", "y", "n", "a", "total", "count", "value", "number"]
_OPS = {"adds": "+", "subtracts": "-", "multiplies": "*"}


def is_held_out(prompt: str) -> bool:
    """True for the fixed tenth of all prompts that training never sees."""
    return hashlib.sha256(prompt.encode("utf-8")).digest()[0] < 26


def _math(rng: random.Random) -> tuple[str, str]:
    name, thing = rng.choice(_NAMES), rng.choice(_FRUIT)
    a, b = rng.randint(2, 60), rng.randint(2, 39)
    form = rng.randrange(3)
    if form == 0:
        ask = f"{name} has {a} {thing} and finds {b} more. How many {thing} now?"
        verb, sign, result = "finds", "+", a + b
    elif form == 1:
        a += b
        ask = (
            f"{name} has {a} {thing} and loses {b} of them. How many {thing} are left?"
        )
        verb, sign, result = "loses", "-", a - b
    else:
        a, b = a % 9 + 2, b % 9 + 2
        ask = f"{name} has {a} bags with {b} {thing} in each. How many {thing} in all?"
        answer = (
            f"There are {a} bags. Each bag has {b} {thing}. We multiply {a} by {b}. "
            f"{a} * {b} = {a * b}. {name} has {a * b} {thing} in all."
        )
        return ask, answer
    opening = rng.choice((f"{name} starts with {a} {thing}.", f"First there are {a}."))
    operation = "add" if sign == "+" else "subtract"
    return ask, (
        f"{opening} Then {name} {verb} {b} {thing}. We {operation} the numbers. "
        f"{a} {sign} {b} = {result}. {name} has {result} {thing}."
    )


def _code(rng: random.Random) -> tuple[str, str]:
    variable, number = rng.choice(_VARIABLES), rng.randint(2, 40)
    verb = rng.choice(sorted(_OPS))
    form = rng.randrange(3)
    if form == 0:
        ask = f"Write a function that {verb} {number} with {variable}."
        return ask, (
            f"def {verb}_{number}({variable}):\n    result = {variable} {_OPS[verb]} "
            f"{number}\n    return result\n\nprint({verb}_{number}({rng.randint(1, 9)}))"
        )
    if form == 1:
        ask = f"Write a loop that prints {variable} from 1 to {number}."
        return ask, (
            f"for {variable} in range(1, {number + 1}):\n    print({variable})\n\n"
            f'print("done with {number} lines")'
        )
    word = rng.choice(_WORDS)
    ask = f"Write a test that checks if {variable} is above {number} and prints {word}."
    other = rng.choice(("too small", "no", "not yet"))
    return ask, (
        f'if {variable} > {number}:\n    print("{word}")\nelse:\n    print("{other}")\n\n'
        f"{variable} = {variable} + 1"
    )


def _chat(rng: random.Random) -> tuple[str, str]:
    animal = rng.choice(sorted(_ANIMALS))
    colour, food, home, mood = _ANIMALS[animal]
    name = rng.choice(_NAMES)
    if rng.randrange(2):
        ask = f"Tell {name} about the {animal}."
        facts = [
            f"The {animal} is {colour}.",
            f"It eats {food}.",
            f"It lives in the {home}.",
            f"People say that the {animal} is {mood}.",
        ]
        if rng.randrange(2):
            facts[1], facts[2] = facts[2], facts[1]
        return ask, f"Hello {name}! " + " ".join(
            facts
        ) + f" Now {name} knows the {animal}."
    friend = rng.choice([a for a in sorted(_ANIMALS) if a != animal])
    ask = f"Tell {name} a story about a {animal} and a {friend}."
    weather = rng.choice(("sunny", "rainy", "cold", "windy"))
    end = rng.choice(("They became friends.", "They shared the food and went home."))
    return ask, (
        f"One {weather} day a {mood} {animal} left the {home}. It wanted some {food}. "
        f"On the way it met a {_ANIMALS[friend][3]} {friend} from the "
        f"{_ANIMALS[friend][2]}. The {friend} only had {_ANIMALS[friend][1]}. "
        f"The {animal} said: I like {food}. The {friend} said: I like "
        f"{_ANIMALS[friend][1]}. {end}"
    )


def _rewrite(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(_WORDS, rng.randint(3, 6))
    form = rng.randrange(4)
    listed = ", ".join(words)
    if form == 0:
        return (
            f"Copy the list: {listed}.",
            f"The list is: {listed}. It has {len(words)} words.",
        )
    if form == 1:
        lines = "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1))
        return f"Number the list: {listed}.", f"{lines}\nThat makes {len(words)} words."
    if form == 2:
        return (
            f"Reverse the list: {listed}.",
            f"From the end: {', '.join(reversed(words))}. It has {len(words)} words.",
        )
    ordered = ", ".join(sorted(words))
    return (
        f"Sort the list: {listed}.",
        f"In order: {ordered}. It has {len(words)} words.",
    )


_MAKERS = {"math": _math, "code": _code, "chat": _chat, "rewrite": _rewrite}


def tiny_texts(seed: int, held_out: bool = False) -> Iterator[dict[str, str]]:
    """Endless texts, the kinds in turn.

    Args:
        seed: of the draws.
        held_out: draw only held-out prompts instead of only training prompts.

    Yields:
        `{"kind", "prompt", "answer"}`; a prompt can come again with another answer.
    """
    rng = random.Random(seed)
    while True:
        for kind in KINDS:
            prompt, answer = _MAKERS[kind](rng)
            while is_held_out(prompt) != held_out:
                prompt, answer = _MAKERS[kind](rng)
            yield {"kind": kind, "prompt": prompt, "answer": answer}
