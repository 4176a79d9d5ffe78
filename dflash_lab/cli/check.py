"""`dflash-lab check`: does a finished drafter fit its target and decode as it trained?

Leaves out: the checks themselves (`clinic/diagnosis.py`).
"""

from __future__ import annotations


def add(commands) -> None:
    """Add the parser of `check`."""
    parser = commands.add_parser(
        "check", help="check that a drafter decodes as it was trained"
    )
    parser.add_argument("--drafter", help="folder or Hub repository of the drafter")
    parser.add_argument(
        "--target", help="tiny, smol, or a folder or Hub repository of its target"
    )
    parser.add_argument(
        "--prompts", help="prompt set or JSON Lines file (default: the pair's own)"
    )
    parser.add_argument(
        "--limit", type=int, default=3, help="prompts per set (default: %(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--explain", action="store_true", help="print the table of symptoms and causes"
    )
    parser.set_defaults(run=run)


def run(arguments) -> int:
    """Print the checks; 1 if one failed."""
    from dflash_lab.clinic.symptoms import symptom_table
    from dflash_lab.errors import DFlashLabError

    if arguments.explain:
        print(symptom_table())
        if not arguments.target:
            return 0
    if not arguments.target:
        raise DFlashLabError("give --target (tiny, smol, or a folder), and --drafter")
    from dflash_lab.clinic.diagnosis import Examination, examine

    pair = _load(arguments)
    prompts = _prompts(arguments, pair)
    examination = Examination.of_prompts(
        pair.drafter,
        pair.target,
        prompts,
        pair.stop_token_ids,
        arguments.max_new_tokens,
    )
    checks = examine(examination)
    for check in checks:
        print(check)
    return 0 if all(check.passed for check in checks) else 1


def _load(arguments):
    from dflash_lab.errors import DFlashLabError
    from dflash_lab.pairs.pair import PAIR_NAMES, load_pair

    named = arguments.target in PAIR_NAMES
    pair = load_pair(
        arguments.target if named else None,
        target=None if named else arguments.target,
        drafter=arguments.drafter,
        dtype=arguments.dtype,
        device=arguments.device,
    )
    if pair.drafter is None:
        raise DFlashLabError("there is nothing to check; give --drafter")
    return pair


def _prompts(arguments, pair) -> list[list[int]]:
    import torch

    from dflash_lab.errors import DFlashLabError
    from dflash_lab.pairs.prompts import load_prompts

    if arguments.limit < 1:
        raise DFlashLabError(f"--limit {arguments.limit} must be 1 or more")
    if pair.tokenizer is None:
        # Bare models have no tokenizer; what they make of random ids is their own text.
        noise = torch.Generator().manual_seed(0)
        shape = (4 * arguments.limit, 8)
        return torch.randint(pair.target.vocab_size, shape, generator=noise).tolist()
    names = [arguments.prompts] if arguments.prompts else pair.prompt_sets
    rows = [p for name in names for p in load_prompts(name, arguments.limit)]
    return [pair.encode(row.turns[0]) for row in rows]
