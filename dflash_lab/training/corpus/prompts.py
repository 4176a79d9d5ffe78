"""Training prompts for instruct targets, written by a small grammar.

`training_prompts` yields prompts of the same four kinds as the held-out sets (math
word problems, code, open questions, rewriting), but from its own templates and word
lists. It also drops any draw that comes close to a held-out prompt, so that measuring
on those sets measures unseen prompts.

Leaves out: the answers. The target writes them (`corpus.py`), because a drafter must
learn what this target says, not what would be right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from dflash_lab.errors import DFlashLabError

KINDS = ("math", "code", "chat", "rewrite")

_TOPICS = """volcanoes|honey bees|the water cycle|black holes|remote work|sourdough bread
|electric cars|the Roman Empire|chess openings|photosynthesis|jazz music|coral reefs
|time management|the French Revolution|sleep|public libraries|solar panels|glaciers
|the printing press|meditation|vaccines|city parks|knitting|the stock market|whales
|train travel|coffee|earthquakes|the Silk Road|running a marathon|probability|theatre
|learning a language|house plants|dinosaurs|the Moon landing|recycling|gravity|pottery
|friendship|computer viruses|rainforests|saving money|ancient Egypt|bicycles|magnets
|cooking rice|the immune system|graphic design|rivers|the Olympics|bird migration
|databases|healthy breakfasts|deserts|the violin|wind power|maps|job interviews|cheese
|the human heart|camping|volunteering|sharks|the Renaissance|lighthouses|robots|tea
|public speaking|fractions|owls|submarines|the alphabet|gardening|lightning|paper
|online shopping|the Great Wall|origami|penguins|calendars|bridges|swimming|dreams
|a balanced diet|the solar system|open source software|metals|patience|fireworks
|elevators|the ocean floor|newspapers|yoga|insects|first aid|storytelling|airports
|traffic lights|salt|mirrors|caves|clocks|compasses|winter sports|street food|trees
|board games|museums|kites|goats|rust|soap|glass|rainbows|tides|thermometers|ants
|lemons|radio|satellites|hurricanes|sewing|windmills|wolves|budgeting|carpentry""".replace(
    "\n", ""
).split("|")

_NAMES = """Ada|Bruno|Chloe|Dmitri|Esther|Farid|Greta|Hiro|Ines|Jonas|Keiko|Leo|Mina|Nadia
|Oscar|Priya|Quentin|Rosa|Samir|Tess|Umar|Vera|Wes|Xenia|Yusuf|Zoe""".replace(
    "\n", ""
).split("|")

_THINGS = """apples|pencils|marbles|tickets|cookies|stickers|books|eggs|seashells|balloons
|stamps|bottles|flowers|coins|cards|bricks|oranges|candles|buttons|chairs""".replace(
    "\n", ""
).split("|")

_PLACES = """bakery|school|farm|library|market|garage|garden shop|hotel|museum|post office
|cinema|hospital|gym|campsite|workshop|harbour""".replace("\n", "").split("|")

_WORDS = _THINGS + _PLACES + _TOPICS

# Each template names its slots; numbers are n1..n4 with n1 > n2 and n3, n4 small.
_TEMPLATES = {
    "math": (
        "{name} has {n1} {things} and gives away {n2}. How many {things} are left?",
        "A {place} sells {n3} boxes with {n4} {things} in each box. How many {things} is that?",
        "{name} saves {n3} dollars every week. How much money is saved after {n4} weeks?",
        "There are {n1} {things} in a {place}. {name} adds {n2} more. What is the total?",
        "{name} shares {n5} {things} equally among {n4} friends. How many does each get?",
        "A train travels {n2} miles per hour for {n3} hours. How far does it go?",
        "Solve a simple math problem about {topic} step by step.",
        "What is {n1} minus {n2}? Show each step.",
        "What is {n1} plus {n2}? Explain how you add the digits.",
        "{name} buys {n3} {things} for {n4} dollars each and pays with a {n1} dollar note. What is the change?",
        "A rectangle is {n3} cm wide and {n4} cm long. What are its area and perimeter?",
        "{name} reads {n3} pages a day. How many days does a book with {n5} pages take?",
        "If {n3} {things} cost {n5} cents, what does one cost?",
        "Write a word problem about a {place} that uses multiplication, then solve it.",
    ),
    "code": (
        "Write a Python function that returns the {agg} of a list of {items}.",
        "Write a Python function that {verb} a string.",
        "Write a Python function that checks whether {check}.",
        "Write a {lang} program that prints the numbers from {n3} to {n1}.",
        "Write a Python class for a {thing_class} with methods to {method} and show the result.",
        "Explain what a {concept} is in programming and give a short example in {lang}.",
        "How do I {task} in {lang}? Show the code.",
        "Write a Python script about {topic} that asks the user a question and checks the answer.",
        "Write a SQL query that selects all {things} from a table where the price is above {n1}.",
        "Write an HTML page with a heading and a list about {topic}.",
        "Give an example of a {concept} in {lang} and explain each line.",
        "Write a Python function with a docstring that converts {unit_a} to {unit_b}.",
    ),
    "chat": (
        "What is the history of {topic}?",
        "Explain {topic} in simple terms.",
        "How does {topic} affect daily life?",
        "What are the main benefits of {topic}?",
        "Write a short story about {topic}.",
        "Write a short poem about {topic}.",
        "List {n3} facts about {topic}.",
        "Compare {topic} with {topic2}.",
        "Give me {n3} tips about {topic}.",
        "Write an email to a friend about {topic}.",
        "I want to learn about {topic}. Where should I start?",
        "Why are people interested in {topic}?",
        "What is a common mistake people make about {topic}?",
        "Create a step by step plan for a school project about {topic}.",
        "Describe {topic} to a five year old.",
        "What would the world be like without {topic}?",
        "Write a dialogue between {name} and {name2} about {topic}.",
        "Write a short paragraph about {topic} and {topic2}.",
        "Can you recommend activities related to {topic} for a weekend?",
        "My friend {name} likes {topic}. What gift could I give?",
        "Write a quiz question with answer about {topic}.",
        "What are the advantages and disadvantages of {topic}?",
    ),
    "rewrite": (
        "Summarize this text in one sentence.\n\n{passage}",
        "Rewrite the following text in a friendly tone.\n\n{passage}",
        "Turn this text into a bulleted list.\n\n{passage}",
        "Correct any mistakes in this text and return it.\n\n{passage}",
        "Rewrite this text in the past tense.\n\n{passage}",
        "Make this text shorter.\n\n{passage}",
        "Put these words in alphabetical order: {words}.",
        "Repeat this list, one item per line: {words}.",
        "Write a title for this text.\n\n{passage}",
        "Rewrite this as a formal letter.\n\n{passage}",
        "Which of these words are about {topic}? {words}",
        "Make a table with two columns, number and word, from this list: {words}.",
        "Rewrite this text for children.\n\n{passage}",
        "Copy this text and replace every name with Alex.\n\n{passage}",
    ),
}

_SLOTS = {
    "agg": "sum|mean|largest value|smallest value|median|product|second largest value|range",
    "items": "numbers|integers|floats|prices|ages|temperatures|scores",
    "verb": "reverses|counts the vowels in|removes all spaces from|capitalizes every word of"
    "|counts the words in|removes duplicate letters from|splits at commas|shortens",
    "check": "a number is even|a number is prime|a word is a palindrome|a year is a leap year"
    "|two lists are equal|a list is sorted|a string contains a digit|a password is long enough"
    "|two words are anagrams|a key is in a dictionary|a number is a perfect square",
    "lang": "Python|JavaScript|Java|C|Go|Ruby",
    "thing_class": "bank account|library book|shopping cart|student|playlist|car|timer|recipe",
    "method": "add an item|remove an item|update a value|reset it|count its parts",
    "concept": "loop|function|variable|list|dictionary|class|recursion|exception|module"
    "|stack|queue|boolean|hash table|binary search|string|set|sorting algorithm|linked list",
    "task": "read a file line by line|sort a list|join two strings|count words|make a web request"
    "|generate a random number|parse a date|remove duplicates from a list|write to a file"
    "|loop over a dictionary|find the length of a string|round a number|merge two lists",
    "unit_a": "miles|pounds|Celsius|inches|gallons|minutes|kilobytes",
    "unit_b": "kilometres|kilograms|Fahrenheit|centimetres|litres|seconds|bytes",
}
_CHOICES = {slot: choices.split("|") for slot, choices in _SLOTS.items()}

_SENTENCES = (
    "{name} opened a {place} near the river {n3} years ago.",
    "Every morning {name} counts the {things} and writes the number in a book.",
    "Many visitors ask about {topic}.",
    "The {place} is closed on Mondays, but {name} still comes to work.",
    "Last week {n2} people came to hear a talk about {topic}.",
    "{name} and {name2} disagree about {topic}, yet they remain good friends.",
    "A box of {things} costs {n3} dollars.",
    "Nobody expected that {topic} would become so popular.",
    "In the evening {name2} cleans the {place} and turns off the lights.",
    "The plan for next year is to learn more about {topic2}.",
    "It rained all day, so {name} stayed inside and read about {topic2}.",
    "Children like the {things} best.",
    "The old {place} needs a new roof, which will cost {n1} dollars.",
    "{name2} wrote a letter to the {place} to say thank you.",
)


def _fill(template: str, rng: random.Random) -> str:
    """The template with its slots filled; all are drawn, also those that it lacks."""
    topic, topic2 = rng.sample(_TOPICS, 2)
    name, name2 = rng.sample(_NAMES, 2)
    small = rng.randint(2, 12)
    large = rng.randint(30, 400)
    slots: dict[str, object] = {
        "topic": topic,
        "topic2": topic2,
        "name": name,
        "name2": name2,
        "things": rng.choice(_THINGS),
        "place": rng.choice(_PLACES),
        "n1": large,
        "n2": rng.randint(2, large - 1),
        "n3": rng.randint(2, 12),
        "n4": small,
        "n5": small * rng.randint(3, 20),
    }
    slots |= {slot: rng.choice(choices) for slot, choices in _CHOICES.items()}
    slots["words"] = ", ".join(rng.sample(_WORDS, rng.randint(4, 8)))
    sentences = rng.sample(_SENTENCES, rng.randint(3, 5))
    if "{passage}" in template:
        slots["passage"] = " ".join(sentences).format(**slots)
    return template.format(**slots)


def _draw(
    kind: str, rng: random.Random, seen: set[str], forbidden: list[set[str]]
) -> str:
    """A prompt of this kind that is new and allowed."""
    for _ in range(2000):
        prompt = _fill(rng.choice(_TEMPLATES[kind]), rng)
        if prompt not in seen and not too_close(prompt, forbidden):
            return prompt
    raise DFlashLabError(
        f"no new {kind} prompt after {len(seen)} prompts; the grammar is exhausted, "
        "ask for fewer or leave this kind out"
    )


def too_close(prompt: str, held_out: list[set[str]], limit: float = 0.5) -> bool:
    """True if the prompt shares too many word triples with any held-out prompt.

    Args:
        prompt: the text to test.
        held_out: `word_triples` of each held-out prompt.
        limit: share of the smaller set of triples that may be common.
    """
    triples = word_triples(prompt)
    return any(
        len(triples & other) > limit * max(1, min(len(triples), len(other)))
        for other in held_out
    )


def word_triples(text: str) -> set[str]:
    """Lower-cased runs of three words, or the whole text if it is shorter."""
    words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    if len(words) < 3:
        return {" ".join(words)}
    return {" ".join(words[i : i + 3]) for i in range(len(words) - 2)}


def training_prompts(
    seed: int, kinds: tuple[str, ...] = KINDS, held_out: tuple[str, ...] = ()
) -> Iterator[dict[str, str]]:
    """Endless distinct training prompts, the kinds in turn.

    Args:
        seed: of the grammar's draws; the same seed gives the same prompts.
        kinds: which kinds to draw, in this order, again and again.
        held_out: prompts that must not be drawn, nor any close to them.

    Yields:
        `{"kind": ..., "prompt": ...}`, each prompt once.
    """
    rng = random.Random(seed)
    forbidden = [word_triples(text) for text in held_out]
    seen: set[str] = set()
    while True:
        for kind in kinds:
            prompt = _draw(kind, rng, seen, forbidden)
            seen.add(prompt)
            yield {"kind": kind, "prompt": prompt}
