"""`dflash-lab bench` and `dflash-lab compare`: measure methods, compare two runs.

Leaves out: measuring (`bench.py`) and tables (`measure/bench_summary.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_lab.cli.loading import add_pair_arguments, load_asked_pair
from dflash_lab.errors import DFlashLabError

if TYPE_CHECKING:
    from dflash_lab.pairs.prompts import Prompt


def add(commands) -> None:
    """Add both commands to a parser's subcommands."""
    parser = commands.add_parser(
        "bench", help="measure methods side by side on prompt sets"
    )
    add_pair_arguments(parser, default="smol")
    parser.add_argument(
        "--prompts",
        help="comma-separated sets or files, such as humaneval,mt-bench,gsm8k-100 "
        "(default: the pair's own)",
    )
    parser.add_argument(
        "--methods",
        default="ar,dflash,ngram,hf_generate,hf_lookup,hf_dflash",
        help="comma-separated; also dflash_compiled, eagle, medusa and hf_assisted "
        "(default: %(default)s)",
    )
    parser.add_argument("--limit", type=int, help="prompts of each set (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block-size", type=int, help="default: as trained")
    parser.add_argument(
        "--assistant", help="small causal LM for hf_assisted (default: the pair's)"
    )
    parser.add_argument("--eagle", help="folder of an EAGLE-style head")
    parser.add_argument("--medusa", help="folder of Medusa-style heads")
    parser.add_argument(
        "--no-certify",
        action="store_true",
        help="do not look for the cause of differences",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench"), help="folder (default: %(default)s)"
    )
    parser.set_defaults(run=run)

    other = commands.add_parser("compare", help="compare a method in two bench runs")
    other.add_argument("runs", nargs=2, type=Path, metavar="RUN")
    other.add_argument("--method", default="dflash", help="default: %(default)s")
    other.set_defaults(run=run_compare)


def run(arguments) -> int:
    """Measure; 1 if an output is not the target's own."""
    from dflash_lab.cli.bench_report import write_outputs
    from dflash_lab.measure.bench import BenchSettings, run_bench
    from dflash_lab.measure.bench_summary import summarize
    from dflash_lab.measure.methods import MethodSettings
    from dflash_lab.pairs.prompts import load_prompts
    from dflash_lab.speculative.sampling import Sampling

    for value, name in (
        (1 if arguments.limit is None else arguments.limit, "--limit"),
        (arguments.max_new_tokens, "--max-new-tokens"),
    ):
        if value < 1:
            raise DFlashLabError(f"{name} {value} must be 1 or more")
    Sampling(arguments.temperature, seed=arguments.seed)
    methods = _names(arguments.methods, "--methods")
    with_drafter = any("dflash" in name for name in methods)
    pair = load_asked_pair(arguments, with_drafter=with_drafter)
    names = list(pair.prompt_sets)
    if arguments.prompts is not None:
        names = _names(arguments.prompts, "--prompts")
    sets: dict[str, Sequence[Prompt]]
    sets = {Path(name).stem: load_prompts(name, arguments.limit) for name in names}
    settings = BenchSettings(
        tuple(methods),
        tuple(names),
        arguments.limit,
        MethodSettings(
            arguments.max_new_tokens,
            arguments.temperature,
            arguments.seed,
            arguments.block_size,
            arguments.assistant,
            arguments.eagle,
            arguments.medusa,
        ),
    )
    records = run_bench(pair, sets, settings, arguments.out)
    found = None
    if "ar" in methods and arguments.temperature == 0 and not arguments.no_certify:
        found = _verdicts(pair, records, sets, arguments.out)
    rows = summarize(records, found)
    report = write_outputs(arguments.out, rows, records)
    _print(rows)
    print(f"\noutputs: {level(rows)}")
    print(f"report: {report}")
    ours = [r for r in rows if not r["method"].startswith("hf_")]
    return int(any(r.get("differ") for r in ours))


def run_compare(arguments) -> int:
    """Print tau and speed of the second run over the first, by prompt set."""
    from dflash_lab.measure.bench import read_records, read_run
    from dflash_lab.measure.bench_summary import compare

    for folder in arguments.runs:
        read_run(folder)
    first, second = (read_records(folder) for folder in arguments.runs)
    found = compare(first, second, arguments.method)
    print(f"{arguments.method}: {arguments.runs[1]} over {arguments.runs[0]}")
    for group, figures in found.items():
        for name, interval in figures.items():
            told = "" if interval.excludes(1.0) else "  (no difference can be told)"
            print(f"  {group:16} {name:6} {interval}{told}")
    return 0


def _verdicts(pair, records, sets, out: Path) -> dict:
    """Verdicts, kept in the run's folder: each costs a plain pass over an answer."""
    from dflash_lab.files import write_text_atomically
    from dflash_lab.measure.bench import verdicts

    path = out / "verdicts.json"
    known = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    known = {tuple(json.loads(key)): value for key, value in known.items()}
    missing = [
        r
        for r in records
        if r["method"] == "ar" or (r["set"], r["id"], r["method"]) not in known
    ]
    prompts = {
        (name, p.id): pair.encode(p.turns[0])
        for name, rows in sets.items()
        for p in rows
    }
    known |= verdicts(pair, missing, prompts)
    text = json.dumps(
        {json.dumps(key): value for key, value in known.items()}, indent=0
    )
    write_text_atomically(path, text + "\n")
    return known


def _names(text: str, option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise DFlashLabError(
            f"{option} {text!r} must name each thing once, at least one"
        )
    return names


def _print(rows: list[dict]) -> None:
    names = ("set", "method", "tau", "tokens/s", "speed-up", "predicted")
    head = "{:14} {:15} {:>18} {:>9} {:>19} {:>9}  ".format(*names)
    print(head + "equal/tie/differ")
    for row in rows:
        same = "/".join(str(row.get(k, "")) for k in ("equal", "ties", "differ"))
        print(
            f"{row['set']:14} {row['method']:15} {_range(row, 'tau'):>18} "
            f"{row['tokens_per_second']:9.1f} {_range(row, 'speedup'):>19} "
            f"{_number(row.get('predicted_speedup')):>9}  {same}"
        )


def level(rows: list[dict]) -> str:
    """In which sense our methods' outputs equal plain decoding."""
    last = rows[-1]["set"]  # all sets together, or the only one
    ours = [
        row
        for row in rows
        if row["set"] == last and not row["method"].startswith("hf_")
    ]
    if any("equal" not in row for row in ours):
        return "not compared"
    if any(row["differ"] for row in ours):
        names = ", ".join(row["method"] for row in ours if row["differ"])
        return f"NOT lossless: rounding does not explain {names}"
    ties = sum(row["ties"] for row in ours)
    where = (
        f" up to {ties} answers with certified ties" if ties else ", token for token"
    )
    return f"L2: equal to ordinary plain decoding{where}"


def _range(row: dict, name: str) -> str:
    if row.get(name) is None:
        return "-"
    return f"{row[name]:.2f} [{row[f'{name}_low']:.2f},{row[f'{name}_high']:.2f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
