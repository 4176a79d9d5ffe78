"""Other programs' figures in our terms, on small files of their shape."""

from __future__ import annotations

import json
import math

import pytest

from dflash_lab.errors import DFlashLabError
from dflash_lab.interop.authors_benchmark import read_authors_benchmark
from dflash_lab.interop.importers import pooled_log, read_log, read_spec_bench
from dflash_lab.measure.acceptance import acceptance_summary, length_histogram

VLLM = (
    "INFO 01-01 00:00:00 [metrics.py:1] SpecDecoding metrics: Mean acceptance length: "
    "2.50, Accepted throughput: 15.00 tokens/s, Drafted throughput: 30.00 tokens/s, "
    "Accepted: 150 tokens, Drafted: 300 tokens, Per-position acceptance rate: 0.800, "
    "0.500, 0.200, Avg Draft acceptance rate: 50.0%"
)
LATER = VLLM.replace("150 tokens", "30 tokens").replace("300 tokens", "90 tokens")
LATER = LATER.replace("0.800, 0.500, 0.200", "0.600, 0.300, 0.100")
SGLANG = (
    "[2026-01-01 00:00:00] Decode batch, #running-req: 1, #token: 90, token usage: "
    "0.00, accept len: 3.45, accept rate: 0.35, cuda graph: True, gen throughput "
    "(token/s): 210.50, #queue-req: 0"
)
LLAMA = (
    "slot print_timing: id 1 | task 0 | draft acceptance = 0.64479 ( 167 accepted / "
    "259 generated), mean acceptance length = 2.92, acceptance rate per position = "
    "(0.805, 0.632, 0.483)"
)


def test_log_lines_of_three_servers(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("\n".join(["hello", VLLM, SGLANG, "", LLAMA]), encoding="utf-8")
    rows = read_log(path).to_dict("records")
    assert [(r["source"], r["line"]) for r in rows] == [
        ("vllm", 2),
        ("sglang", 3),
        ("llama_cpp", 5),
    ]
    vllm, sglang, llama = rows
    assert (vllm["tau"], vllm["accepted"], vllm["drafted"]) == (2.5, 150, 300)
    assert vllm["survival"] == (0.8, 0.5, 0.2)
    assert vllm["draft_acceptance_rate"] == 0.5
    # What the line means by its terms: tau counts the bonus token.
    assert vllm["tau"] == 1 + vllm["accepted"] / (vllm["drafted"] / 3)
    assert vllm["tau"] == pytest.approx(1 + sum(vllm["survival"]))
    assert (sglang["tau"], sglang["tokens_per_second"]) == (3.45, 210.5)
    assert math.isnan(sglang["drafted"])
    assert llama["survival"][0] == 0.805 and llama["accepted"] == 167
    assert llama["tau"] == 2.92


def test_lines_are_pooled_by_their_cycles(tmp_path):
    path = tmp_path / "vllm.log"
    path.write_text(f"{VLLM}\n{LATER}\n", encoding="utf-8")
    pooled = pooled_log(read_log(path))
    assert pooled["cycles"] == 100 + 30
    assert pooled["tau"] == pytest.approx(1 + 180 / 130)
    assert pooled["survival"][0] == pytest.approx((80 + 18) / 130)
    path.write_text(SGLANG, encoding="utf-8")
    with pytest.raises(DFlashLabError, match="no line tells"):
        pooled_log(read_log(path))
    path.write_text("\n".join([VLLM, LLAMA.replace(", 0.483", "")]), encoding="utf-8")
    with pytest.raises(DFlashLabError, match="different numbers of slots"):
        pooled_log(read_log(path))


def test_spec_bench_answers_become_a_trace(tmp_path):
    rows = [
        {
            "question_id": 81,
            "category": "writing",
            "choices": [
                {
                    "turns": ["...", "..."],
                    "new_tokens": [5, 4],
                    "wall_time": [0.5, 0.25],
                    "accept_lengths": [2, 3, 1, 3],
                }
            ],
        },
        {
            "question_id": 82,
            "category": "math",
            "choices": [
                {"new_tokens": [6], "wall_time": [0.3], "accept_lengths": [4, 2]}
            ],
        },
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    trace, facts = read_spec_bench(path)
    assert [f["id"] for f in facts] == ["81.1", "81.2", "82.1"]
    assert trace.acceptance_lengths == [[2, 3], [1, 3], [4, 2]]
    assert acceptance_summary([trace])["tau"] == 15 / 6
    assert length_histogram([trace]) == {1: 1, 2: 2, 3: 2, 4: 1}
    assert facts[1] == {"id": "81.2", "kind": "writing", "tokens": 4, "seconds": 0.25}


@pytest.mark.parametrize("text", ["{}\n", "[1]\n", "x\n", '{"choices": [{}]}\n', "\n"])
def test_other_files_are_refused(text, tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DFlashLabError, match=r"other\.jsonl"):
        read_spec_bench(path)
    with pytest.raises(DFlashLabError, match="no line about acceptance"):
        read_log(path)
    with pytest.raises(DFlashLabError, match="cannot read"):
        read_log(tmp_path / "missing.log")


# --- the authors' benchmark ---------------------------------------------------------

LOCAL = """[cached] cache/some.jsonl  (12 samples)
Baseline throughput: 40.00 tok/s
DFlash throughput:  125.00 tok/s
Decoding speedup: 3.12
Average Acceptance length: 2.75
Acceptance length histogram: ['0.0%', '25.0%', '25.0%', '12.5%',
'37.5%']
"""
SERVER = """
==================================================
Backend:          sglang
Dataset:          some
Num prompts:      16
Concurrency:      4
Latency:          2.0s
Output tokens:    2016
Throughput:       1,008.00 tok/s
Accept length:    4.100
Spec verify ct:   500
==================================================
"""


def test_the_authors_summary_of_one_process(tmp_path):
    path = tmp_path / "run.log"
    path.write_text(LOCAL, encoding="utf-8")
    (row,) = read_authors_benchmark(path).to_dict("records")
    assert (row["source"], row["line"]) == ("dflash_local", 2)
    # Pooled over cycles, beside the printed mean of the responses' means.
    assert row["tau"] == pytest.approx(0.25 + 0.5 + 0.375 + 1.5)
    assert row["mean_tau"] == 2.75
    assert row["histogram"] == pytest.approx((0.25, 0.25, 0.125, 0.375))
    assert row["survival"] == pytest.approx((0.75, 0.5, 0.375))
    assert row["tau"] == pytest.approx(1 + sum(row["survival"]))
    assert row["draft_acceptance_rate"] == pytest.approx(1.625 / 3)
    assert (row["tokens_per_second"], row["ms_per_token"]) == (125.0, 8.0)
    assert (row["baseline_tokens_per_second"], row["speedup"]) == (40.0, 3.12)
    assert math.isnan(row["cycles"]) and math.isnan(row["drafted"])


def test_the_authors_definitions_agree_with_ours(tmp_path):
    """Two responses, printed as they do and read back, against the trace itself."""
    responses = [[1, 1, 1, 4], [4, 4]]
    pooled = [x for lengths in responses for x in lengths]
    shares = [f"{100 * pooled.count(b) / len(pooled):.1f}%" for b in range(5)]
    mean = sum(sum(r) / len(r) for r in responses) / 2
    path = tmp_path / "run.log"
    path.write_text(
        "\x1b[1mBaseline throughput: 10.00 tok/s\x1b[0m\r\n"
        f"Average Acceptance length: {mean:.2f}\n"
        f"Acceptance length histogram: {shares}\n",
        encoding="utf-8",
    )
    (row,) = read_authors_benchmark(path).to_dict("records")
    assert row["tau"] == pytest.approx(sum(pooled) / len(pooled), abs=0.005)
    assert row["mean_tau"] == pytest.approx(2.875, abs=0.005)
    assert row["survival"] == pytest.approx((0.5, 0.5, 0.5), abs=0.001)


def test_the_authors_summary_of_a_server(tmp_path):
    path = tmp_path / "run.log"
    vllm = SERVER.replace("sglang", "vllm").replace("Accept length", "Other")
    vllm = vllm.replace("Spec verify ct", "Another")
    path.write_text(SERVER + "noise\n" + LOCAL + vllm, encoding="utf-8")
    server, local, other = read_authors_benchmark(path).to_dict("records")
    assert server["source"] == other["source"] == "dflash_server"
    assert local["tau"] == pytest.approx(2.625) and math.isnan(local["prompts"])
    # 16 first tokens come from the prompts' passes.
    assert server["tau"] == 4.0 and server["accepted"] == 1500
    assert server["mean_tau"] == 4.1 and server["cycles"] == 500
    assert server["tokens_per_second"] == other["tokens_per_second"] == 1008.0
    assert (server["prompts"], server["concurrency"]) == (16, 4)
    assert math.isnan(other["tau"]) and math.isnan(other["cycles"])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("hello\n", "no summary of the authors' benchmark"),
        (LOCAL.replace("\n'37.5%']\n", ""), "cut or damaged"),
        (LOCAL.replace("'37.5%'", "'3.5%'"), "66.0 %, not 100"),
    ],
)
def test_other_printouts_are_refused(text, word, tmp_path):
    path = tmp_path / "run.log"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DFlashLabError, match=word):
        read_authors_benchmark(path)
    with pytest.raises(DFlashLabError, match="cannot read"):
        read_authors_benchmark(tmp_path / "missing.log")
