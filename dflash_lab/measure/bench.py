"""Measuring methods side by side: same prompts, in turns, in one process.

Every prompt is decoded by every method, one after the other, in an order that changes
from prompt to prompt, after a warm-up that is not counted. Each answer is one line of
`records.jsonl`, written when it is there, so a run can be stopped and goes on where it
was. Seconds are wall clock with prefill, and without tokenizing and loading.

Leaves out: figures and tables (`bench_summary.py`), and the methods (`methods.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from dflash_lab.errors import DFlashLabError
from dflash_lab.files import environment, write_text_atomically
from dflash_lab.measure.methods import Method, MethodSettings, make_method
from dflash_lab.measure.race import short_collections
from dflash_lab.pairs.pair import Pair
from dflash_lab.pairs.prompts import Prompt
from dflash_lab.speculative.certify import explain
from dflash_lab.speculative.trace import CycleRecord, DecodeTrace

RECORDS, RUN = "records.jsonl", "run.json"


@dataclass(frozen=True)
class BenchSettings:
    """A run's settings; a run that goes on must have the same.

    Attributes:
        methods: names, see `methods.METHODS`.
        prompts: names or files of prompt sets.
        limit: prompts of each set; all if None.
        decode: what all methods share.
    """

    methods: tuple[str, ...]
    prompts: tuple[str, ...]
    limit: int | None
    decode: MethodSettings


def run_bench(
    pair: Pair,
    sets: dict[str, Sequence[Prompt]],
    settings: BenchSettings,
    out: Path,
    *,
    quiet: bool = False,
) -> list[dict]:
    """Decode every prompt by every method; goes on from what is in `out`.

    Args:
        pair: target, drafter, tokenizer.
        sets: prompts by the name of their set; the first turn of each is asked.
        settings: see `BenchSettings`.
        out: the run's folder.
        quiet: no progress bar.

    Returns:
        The records, one for each prompt and method.

    Raises:
        DFlashLabError: a method that cannot run, a folder that holds another run.
    """
    methods = {
        name: make_method(name, pair, settings.decode) for name in settings.methods
    }
    tasks = [
        (name, prompt, pair.encode(prompt.turns[0]))
        for name, prompts in sets.items()
        for prompt in prompts
    ]
    _check_unique(tasks)
    start_run(pair, settings, out)
    records = read_records(out)
    done = {(r["set"], r["id"], r["method"]) for r in records}
    total = len(tasks) * len(methods)
    if len(done) < total:
        for method in methods.values():
            method(tasks[0][2])  # warm-up, not counted
    names = list(methods)
    with (
        open(out / RECORDS, "a", encoding="utf-8") as file,
        tqdm(total=total, initial=len(done), desc="bench", disable=quiet) as progress,
        short_collections(),
    ):
        for number, (group, prompt, ids) in enumerate(tasks):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                if (group, prompt.id, name) in done:
                    continue
                record = measure(methods[name], ids)
                record = {"set": group, "id": prompt.id, "method": name} | record
                file.write(json.dumps(record) + "\n")
                file.flush()
                records.append(record)
                progress.update()
    return records


def measure(method: Method, ids: Sequence[int]) -> dict:
    """One answer as a record.

    Raises:
        KeyboardInterrupt: half an answer must not enter the figures.
    """
    answer = method(ids)
    if answer.interrupted:
        raise KeyboardInterrupt
    record = {
        "prompt_tokens": len(ids),
        "ids": answer.ids,
        "seconds": answer.seconds,
        "first_token": answer.first_token,
    }
    if answer.trace is not None:
        record["header"] = answer.trace.header
        record["cycles"] = [asdict(cycle) for cycle in answer.trace.cycles]
    return record


def trace_of(record: dict) -> DecodeTrace | None:
    """The trace in a record; None for methods that have none."""
    if "cycles" not in record:
        return None
    return DecodeTrace(record["header"], [CycleRecord(**c) for c in record["cycles"]])


def verdicts(
    pair: Pair, records: Sequence[dict], prompts: dict[tuple[str, str], list[int]]
) -> dict[tuple[str, str, str], str]:
    """Whether each greedy answer is plain decoding's: `equal`, `tie`, or `differs`.

    Args:
        pair: the target judges.
        records: of a greedy run with the method `ar`.
        prompts: token ids of each (set, id).
    """
    plain = {(r["set"], r["id"]): r["ids"] for r in records if r["method"] == "ar"}
    found = {}
    for record in records:
        key = record["set"], record["id"]
        if key not in plain:
            continue
        verdict = "equal"
        if record["ids"] != plain[key]:
            ties = explain(pair.target, prompts[key], record["ids"], plain[key])
            verdict = "tie" if ties and all(t.certified for t in ties) else "differs"
        found[(*key, record["method"])] = verdict
    return found


def start_run(pair: Pair, settings: BenchSettings, out: Path) -> None:
    """Write what the run is to `run.json`, or check that it is the one begun."""
    from dflash_lab.training.run.card import git_state

    note = {
        "pair": pair.name,
        "target": pair.target.fingerprint(),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "device": str(pair.target.device),
        "settings": json.loads(json.dumps(asdict(settings))),
    }
    path = out / RUN
    if path.is_file():
        begun = json.loads(path.read_text(encoding="utf-8"))
        other = [name for name in note if begun.get(name) != note[name]]
        if other:
            raise DFlashLabError(
                f"{out} holds a run with another {' and '.join(other)}; choose another "
                "folder with --out, or repeat the command that began it"
            )
        return
    note |= {"environment": environment(), "git": git_state()}
    write_text_atomically(path, json.dumps(note, indent=2) + "\n")


def read_run(out: Path) -> dict:
    """`run.json` of a run's folder.

    Raises:
        DFlashLabError: no run there.
    """
    path = Path(out) / RUN
    if not path.is_file():
        raise DFlashLabError(f"{out} holds no bench run (no {RUN})")
    return json.loads(path.read_text(encoding="utf-8"))


def read_records(out: Path) -> list[dict]:
    """Records of a run; a half-written last line is taken off."""
    path = Path(out) / RECORDS
    if not path.is_file():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):  # killed while writing
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return [json.loads(line) for line in whole.decode("utf-8").split("\n") if line]


def _check_unique(tasks) -> None:
    seen = set()
    for group, prompt, _ in tasks:
        if (group, prompt.id) in seen:
            raise DFlashLabError(f"{group} has two prompts with the id {prompt.id}")
        seen.add((group, prompt.id))
