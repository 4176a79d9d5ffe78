"""The commands as a user types them: results, files, errors and exit status."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from helpers import CONFORMANCE, random_target
from reference import generate_greedily

from dflash_lab.cli import demo_run
from dflash_lab.cli.main import main
from dflash_lab.errors import DFlashLabError
from dflash_lab.pairs.pair import load_pair
from dflash_lab.speculative.certify import certify, explain
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import Plain
from dflash_lab.speculative.sampling import Sampling
from dflash_lab.speculative.trace import DecodeTrace

FOLDERS = [
    "--target",
    str(CONFORMANCE / "target"),
    "--drafter",
    str(CONFORMANCE / "drafter"),
    "--dtype",
    "float32",
]
TINY = ["--pair", "tiny"]
PROMPT = "Tell Mia about the fox."


def test_generate_json_is_one_object_and_nothing_else(capsys):
    base = ["generate", *FOLDERS, "--input-ids", "100,3,17,44", "--json"]
    outputs = {}
    for proposer in ("dflash", "ngram", "none"):
        assert main([*base, "--proposer", proposer, "--max-new-tokens", "30"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert set(answer) >= {
            "text",
            "output_ids",
            "acceptance_lengths",
            "tau",
            "num_cycles",
            "tokens_per_second",
            "time_to_first_token",
        }
        assert answer["text"] is None and len(answer["output_ids"]) == 30
        assert 1 + sum(answer["acceptance_lengths"]) == 30
        assert answer["num_cycles"] == len(answer["acceptance_lengths"])
        outputs[proposer] = answer["output_ids"]
    assert outputs["dflash"] == outputs["ngram"] == outputs["none"]


def test_generate_streams_the_text(capsys):
    assert main(["generate", *TINY, "--prompt", PROMPT]) == 0
    streamed = capsys.readouterr()
    assert main(["generate", *TINY, "--prompt", PROMPT, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert streamed.out.strip() == answer["text"].strip() != ""
    assert "tau" in streamed.err and answer["stop_reason"] == "stop_token"


def test_generate_samples_by_seed(capsys):
    def run(*more):
        base = ["generate", *TINY, "--prompt", PROMPT, "--temperature", "1.5", "--json"]
        assert main([*base, *more]) == 0
        return json.loads(capsys.readouterr().out)["output_ids"]

    first = run("--seed", "1")
    assert first == run("--seed", "1", "--proposer", "none")
    assert first == run("--seed", "1", "--block-size", "3")
    assert any(first != run("--seed", str(seed)) for seed in (2, 3, 4))


def test_stop_strings_stop_where_generate_stops(capsys):
    base = ["generate", *TINY, "--prompt", PROMPT, "--json"]
    assert main(base) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main([*base, "--stop", "It "]) == 0
    cut = json.loads(capsys.readouterr().out)
    assert cut["stop_reason"] == "stop_string"
    assert 0 < len(cut["output_ids"]) < len(whole["output_ids"])
    pair = load_pair("tiny", with_drafter=False)
    ids = torch.tensor([pair.encode(PROMPT)])
    expected = pair.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=128,
        do_sample=False,
        stop_strings=["It "],
        tokenizer=pair.tokenizer,
    )
    assert cut["output_ids"] == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature -1.0"),
        (["--top-p", "0"], "top_p 0.0"),
        (["--top-p", "1.1"], "top_p 1.1"),
        (["--top-k", "-2"], "top_k -2"),
        (["--block-size", "1"], "block_size 1 is outside 2..8"),
        (["--block-size", "9"], "block_size 9 is outside 2..8"),
        (["--proposer", "magic"], "unknown proposer 'magic'"),
        (["--rule", "maybe"], "unknown acceptance rule 'maybe'"),
        (["--max-new-tokens", "0"], "max_new_tokens 0"),
        (["--dtype", "float16"], "float16"),
        (["--threads", "0"], "--threads 0"),
        (["--input-ids", "5,128"], "128"),
        (["--input-ids", "-3"], "-3"),
        (["--input-ids", "a,b"], "'a,b'"),
        (["--input-ids", ","], "empty"),
        (["--stop", "x"], "tokenizer"),
        (["--pair", "huge"], "pair"),
        (["--drafter", "no/where"], "no/where"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    base = ["generate", *FOLDERS, "--json"]
    if "--input-ids" not in arguments:
        base += ["--input-ids", "1,2"]
    assert main([*base, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("dflash-lab: error: ") and said.err.count("\n") == 1
    assert message in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pair", "tinny"], "unknown pair 'tinny'"),
        ([*TINY, "--prompts", "maths"], "unknown prompt set 'maths'"),
        ([*TINY, "--prompt", "  "], "empty"),
        ([*TINY, "--limit", "0"], "--limit 0"),
        ([*TINY, "--block-size", "99"], "block_size 99"),
        (["--target", str(CONFORMANCE / "target")], "needs a drafter"),
    ],
)
def test_bad_demo_leaves_no_files(arguments, message, capsys, tmp_path):
    out = tmp_path / "report"
    assert main(["demo", *arguments, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_said_before_any_work(capsys, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    out = str(blocked / "report")
    assert main(["demo", *TINY, "--prompt", PROMPT, "--out", out]) == 2
    assert "file" in capsys.readouterr().err


def test_unknown_commands_and_options_are_status_2(capsys):
    for arguments in ([], ["fly"], ["generate", "--pair", "tiny"], ["demo", "--x"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    capsys.readouterr()


@pytest.mark.slow
def test_demo_writes_what_it_measured(capsys, tmp_path):
    out = tmp_path / "report"
    arguments = ["--limit", "1", "--max-new-tokens", "60", "--out", str(out)]
    assert main(["demo", *TINY, *arguments]) == 0
    said = capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert summary["pair"] == "tiny" and summary["dtype"] == "float32"
    assert summary["equal"] is True and summary["ties"] == 0
    assert summary["prompts"] == 4 == summary["equal_to_generate"]
    assert set(summary) >= {
        "tau",
        "speedup",
        "speedup_vs_generate",
        "tokens_per_second",
        "plain_tokens_per_second",
        "acceptance_per_position",
        "draft_ms",
        "verify_ms",
        "other_ms",
    }
    assert 1 <= summary["tau"] <= 8
    assert len(summary["acceptance_per_position"]) == 7
    trace = DecodeTrace.from_jsonl(out / "trace.jsonl")
    assert trace.tau == pytest.approx(summary["tau"])
    assert trace.header["num_prompts"] == 4
    assert trace.cycles[0].target_entropy  # details are in the trace
    page = (out / "report.html").read_text("utf-8")
    assert "http://" not in page and "https://" not in page
    assert f"{summary['tau']:.2f}" in page and f"{summary['tau']:.2f}" in said
    names = {path.name for path in out.iterdir()}
    assert names == {
        "summary.json",
        "trace.jsonl",
        "report.html",
        "acceptance.png",
        "lengths.png",
        "time.png",
    }
    assert str(out / "report.html") in said


def test_demo_escapes_the_prompt(capsys, tmp_path):
    prompt = "<script>alert(1)</script>"
    arguments = ["--prompt", prompt, "--max-new-tokens", "8", "--out", str(tmp_path)]
    assert main(["demo", *TINY, *arguments]) == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "<script" not in page and "&lt;script&gt;" in page


@pytest.mark.parametrize("fault", ["wrong token", "lost end"])
def test_demo_fails_if_the_drafted_text_is_not_the_targets(
    fault, capsys, tmp_path, monkeypatch
):
    """A loop that commits a wrong token or loses some must end with status 1."""
    real = demo_run.loop_method

    def method(pair, proposer, *arguments, **options):
        decode = real(pair, proposer, *arguments, **options)

        def wrong(ids):
            made = decode(ids)
            if proposer.name == "dflash":
                if fault == "wrong token":
                    made.ids[-1] = (made.ids[-1] + 1) % 100
                else:  # the end of the answer is lost
                    del made.ids[3:]
                    made.trace.cycles.clear()
            return made

        return wrong

    monkeypatch.setattr(demo_run, "loop_method", method)
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "8", "--out", str(tmp_path)]
    assert main(["demo", *TINY, *arguments]) == 1
    assert "NOT lossless" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    assert summary["equal"] is False and summary["lossless"] is False
    assert main(["demo", *TINY, "--strict", *arguments]) == 1


def test_a_strict_demo_says_its_level(capsys, tmp_path):
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "24", "--out", str(tmp_path)]
    for dtype in ("float32", "bfloat16"):
        command = ["demo", "--pair", "tiny", "--dtype", dtype, "--strict"]
        assert main([*command, *arguments]) == 0
        assert "L1: bit for bit" in capsys.readouterr().out
        summary = json.loads((tmp_path / "summary.json").read_text("utf-8"))
        assert summary["level"].startswith("L1") and summary["equal"]


def test_certificates_tell_ties_from_errors():
    target = random_target(0)
    prompt = [3, 5, 8]
    text = generate_greedily(target, prompt, 10)
    assert certify(target, prompt, text) == []
    wrong = [*text[:4], (text[4] + 1) % 61, *text[5:]]
    differences = certify(target, prompt, wrong)
    assert differences[0].index == 4 and differences[0].choice == text[4]
    assert not differences[0].certified
    # Two identical rows of the head tie exactly: either token is a tie.
    with torch.no_grad():
        twin = (text[4] + 1) % 61
        target.head.weight[twin] = target.head.weight[text[4]] * (1 - 1e-7)
    tied = certify(target, prompt, [*text[:4], twin])
    assert [tie.certified for tie in tied] == [True] * len(tied)
    sampling = Sampling(1.1, top_k=30, seed=4)
    sampled = speculative_generate(
        target, Plain(), prompt, max_new_tokens=10, sampling=sampling
    ).output_ids[0]
    assert certify(target, prompt, sampled, sampling) == []
    assert certify(target, prompt, sampled) != []


def test_an_interrupted_demo_reports_nothing(capsys, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_lab.target.fused.FusedTarget.forward", interrupted)
    out = ["--out", str(tmp_path)]
    assert main(["demo", *TINY, "--prompt", PROMPT, *out]) == 130
    assert list(tmp_path.iterdir()) == []


def test_a_tie_may_lie_on_the_side_of_plain_decoding():
    """Where the drafted text is the one-row choice, plain decoding took the tie."""
    target = random_target(0)
    prompt = [3, 5, 8]
    text = generate_greedily(target, prompt, 10)
    other = [*text[:4], (text[4] + 1) % 61, *text[5:]]
    assert explain(target, prompt, text, text) == []
    for output, plain in ((text, other), (other, text)):
        assert explain(target, prompt, output, plain)[0].index == 4
    assert explain(target, prompt, text, other)[0].token == other[4]


def test_text_sampled_by_the_speculative_rule_has_no_certificate():
    target = random_target(0)
    with pytest.raises(DFlashLabError, match="only rule 'match'"):
        certify(target, [1], [2], Sampling(1.0, rule="speculative"))


def test_doctor_runs(capsys):
    status = main(["doctor"])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "torch" in said and "tiny pair: loads" in said and "FAIL" not in said


@pytest.mark.slow
def test_module_and_version():
    done = subprocess.run(
        [sys.executable, "-m", "dflash_lab", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "0.1.0"
