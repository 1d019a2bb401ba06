from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from spec_stack import PrefillConfig, SpecStackGenerator
from spec_stack.cli import build_parser, main
from spec_stack.demo import MODULES, format_demo, hide_fact, run_demo


def test_the_defaults_are_those_of_the_configuration() -> None:
    arguments = build_parser().parse_args(["generate", "x"])
    assert arguments.keep_rate == PrefillConfig.keep_rate
    assert arguments.threshold == PrefillConfig.min_prompt_tokens
    assert arguments.look_ahead == PrefillConfig.look_ahead


def test_generate_streams_what_the_library_gives(
    embedded: SpecStackGenerator, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "def read_lines(path):\n"
    expected = embedded.generate(prompt, max_tokens=20).text + "\n"
    file = tmp_path / "prompt.txt"
    file.write_text(prompt)
    common = ["--max-tokens", "20", "--device", "cpu"]
    assert main(["generate", prompt, *common]) == 0
    assert capsys.readouterr().out == expected
    assert main(["generate", "--file", str(file), *common]) == 0
    assert capsys.readouterr().out == expected
    monkeypatch.setattr("sys.stdin", io.StringIO(prompt))
    assert main(["generate", *common]) == 0
    assert capsys.readouterr().out == expected


def test_json_carries_text_and_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "Hello", "--system", "Be brief.", "--max-tokens", "8", "--gamma", "2", "--json"]
    assert main([*command, "--specprefill", "on", "--keep-rate", "0.5"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["finish_reason"] in ("eos", "length")
    assert answer["metrics"]["num_tokens"] <= 8
    assert answer["metrics"]["specprefill_reason"].startswith("on")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "   "], "prompt is empty"),
        (["generate", "--file", "missing.txt"], "cannot read missing.txt"),
        (["generate", "x", "--keep-rate", "2"], "keep_rate"),
        (["generate", "x", "--gamma", "99"], "gamma"),
        (["generate", "x", "--policy", "clever"], "unknown policy"),
        (["generate", "x", "--max-tokens", "99999"], "positions"),
        (["generate", "x", "--target", "./nowhere", "--draft", "./nowhere"], "neither a folder nor a hub id"),
        (["generate", "x", "--precision", "int3"], "unknown precision"),
        (["demo", "--repeats", "0"], "--repeats"),
        (["demo", "--tokens", "99999"], "fewer than"),
    ],
)
def test_bad_input_ends_with_status_2_and_the_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_the_doctor_says_whether_the_pair_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "the pair fits together" in capsys.readouterr().out
    assert main(["doctor", "--json", "--precision", "int3"]) == 1
    assert "unknown precision" in json.loads(capsys.readouterr().out)["problem"]


@pytest.mark.parametrize("seed", range(len(MODULES)))
def test_a_hidden_fact_stands_once_in_a_document_of_the_asked_length(embedded: SpecStackGenerator, seed: int) -> None:
    fact = hide_fact(embedded.tokenizer, 3000, seed)
    assert fact.document.count(f"is {fact.answer}.") == 1
    assert fact == hide_fact(embedded.tokenizer, 3000, seed)
    num_tokens = len(embedded.tokenizer(fact.document).input_ids)
    assert 3000 <= num_tokens <= 3060
    assert 0 <= fact.depth < 1


def test_the_demo_reports_both_modes_side_by_side(embedded: SpecStackGenerator) -> None:
    report = run_demo(embedded, num_tokens=2200, seed=0, repeats=1)
    dense, sparse = report["modes"].values()
    assert dense["keep_rate"] == 1.0
    assert 0.15 < sparse["keep_rate"] < 0.25
    assert dense["acceptance_rate"] is None
    assert report["lossless"] is True
    table = format_demo(report)
    for label in ("time to first token", "decoding", "share of the prompt kept", "accepted", "Q: What is the"):
        assert label in table
