"""`dflash-lab explain`: why drafts were lost, and what each remedy would win.

Leaves out: the replay (`measure/replay.py`) and the reasons (`measure/explain.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_lab.cli.loading import add_pair_arguments, load_asked_pair
from dflash_lab.errors import DFlashLabError

if TYPE_CHECKING:
    import pandas as pd

    from dflash_lab.measure.replay import Replay, ReplayTable
    from dflash_lab.pairs.pair import Pair


def add(commands) -> None:
    """Add the command to a parser's subcommands."""
    parser = commands.add_parser(
        "explain", help="say why drafts are lost, and what each remedy would win"
    )
    add_pair_arguments(parser, default="smol")
    parser.add_argument(
        "--prompts",
        help="a prompt set's name or a JSON Lines file (default: the pair's)",
    )
    parser.add_argument(
        "--limit", type=int, default=4, help="prompts per set (default: %(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, help="default: %(default)s"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for lost.csv and reasons.png (default: none)"
    )
    parser.set_defaults(run=run)


def run(arguments) -> int:
    """Decode, replay and print."""
    from dflash_lab.measure.explain import advice, levers, lost_slots, reasons_by_slot

    for value, name in (
        (arguments.limit, "--limit"),
        (arguments.max_new_tokens, "--max-new-tokens"),
    ):
        if value < 1:
            raise DFlashLabError(f"{name} {value} must be 1 or more")
    pair = load_asked_pair(arguments)
    if pair.drafter is None:
        raise DFlashLabError("there is no drafter to explain; give --drafter")
    tables, tau = _decode(pair, arguments)
    size = pair.drafter.config.block_size
    lost, won = lost_slots(tables, size), levers(tables, size)
    print(f"{len(tables)} answers, tau {tau:.2f} measured by the loop\n")
    _print_reasons(lost, reasons_by_slot(lost))
    _print_levers(won)
    print()
    for sentence in advice(lost, won):
        print(f"* {sentence}")
    if arguments.out is not None:
        print(f"\nfiles: {_write(arguments.out, lost)}")
    return 0


def _decode(pair: Pair, arguments) -> tuple[list[ReplayTable], float]:
    """Replay tables of the pair's answers, and the tau that the loop had on them."""
    from tqdm import tqdm

    from dflash_lab.measure.acceptance import pooled_tau
    from dflash_lab.measure.replay import replay_table
    from dflash_lab.pairs.prompts import load_prompts
    from dflash_lab.speculative.generate import speculative_generate
    from dflash_lab.speculative.proposer import DFlash

    assert pair.drafter is not None
    names = [arguments.prompts] if arguments.prompts else pair.prompt_sets
    prompts = [p for name in names for p in load_prompts(name, arguments.limit)]
    limit, proposer = arguments.max_new_tokens, DFlash(pair.drafter)
    tables, traces = [], []
    for prompt in tqdm(prompts, desc="explain", unit="answer"):
        ids = pair.encode(prompt.turns[0])
        result = speculative_generate(
            pair,
            proposer,
            ids,
            max_new_tokens=limit,
            stop_token_ids=pair.stop_token_ids,
        )
        if result.stop_reasons[0] == "interrupted":
            raise KeyboardInterrupt
        answer = result.output_ids[0]
        # A row near the position limit had a smaller budget than was asked for.
        reached = limit if len(answer) < limit else len(answer)
        tables.append(
            replay_table(pair.drafter, pair.target, ids, answer, budget=reached)
        )
        traces.append(result.trace)
    return tables, pooled_tau(traces)


def _print_reasons(lost: pd.DataFrame, by_slot: pd.DataFrame) -> None:
    first = lost[lost["first"]]
    print("where the right token stood, at the slot that ended the cycle")
    for reason, share in first["reason"].value_counts(normalize=True).items():
        print(f"  {reason:22} {share:4.0%}")
    print(f"  {'in lookup':22} {first['in_lookup'].mean():4.0%}")
    print(f"  {'target near a tie':22} {first['near_tie'].mean():4.0%}")
    print("\nall lost drafts, by slot (a first choice is lost to a slot before it)")
    print(f"  {'slot':5}" + "".join(f"{name:>18}" for name in by_slot.columns))
    for slot, row in by_slot.iterrows():
        print(f"  {slot!s:5}" + "".join(f"{share:18.0%}" for share in row))


def _print_levers(won: dict[str, Replay]) -> None:
    chain = won["chain"].tau
    print("\nwhat each lever wins, with the same rows in every verification")
    for name, found in won.items():
        gain = found.tau / chain
        print(
            f"  {name:24} tau {found.tau:5.2f}  {gain:5.2f}x  "
            f"{found.mean_rows:4.1f} rows"
        )


def _write(out: Path, lost: pd.DataFrame) -> Path:
    from dflash_lab.files import write_text_atomically
    from dflash_lab.measure.explain import reasons_by_slot
    from dflash_lab.views.curves import figure_png
    from dflash_lab.views.reasons import reasons_figure

    write_text_atomically(out / "lost.csv", lost.to_csv(index=False))
    figure, _ = reasons_figure(reasons_by_slot(lost))
    (out / "reasons.png").write_bytes(figure_png(figure))
    return out
