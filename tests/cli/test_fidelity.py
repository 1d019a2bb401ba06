"""`spec-stack doctor --measure --prompts`: prompts of a file or of documents in, a table out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_stack import SpecStackGenerator
from spec_stack.bench.prompts import document_prompts, read_prompts
from spec_stack.cli.main import main

CODE = "".join(f"def step_{number}(x):\n    return x + {number}\n\n" for number in range(24))
TEXT = "The clerk of the harbour counted {} grey barrels before noon. Nobody else had seen the old ledger.\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; give a line of JSON per prompt"),
        ('{"text": "a"}\n\n{"text"', "line 3 is not JSON"),
        ('["a"]', "line 1 must be a JSON object, got list"),
        ('{"messages": 3}', 'line 1 must be a text, or have "messages" (a list)'),
        ('{"text": "a"}\n{"prompt": ""}', "line 2 must be a text, or have"),
    ],
)
def test_what_is_wrong_with_a_file_of_prompts_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    assert main(["doctor", "--measure", "--prompts", str(path), "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_prompts_go_with_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--prompts", "x.jsonl"]) == 2
    assert "go with --measure" in capsys.readouterr().err


def test_a_file_keeps_its_prompts(tmp_path: Path) -> None:
    prompts = [{"messages": [{"role": "user", "content": "a\u2028b"}], "model": "m"}, {"text": "c"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(each, ensure_ascii=False) for each in prompts), encoding="utf-8")
    assert read_prompts(path) == prompts


def test_documents_get_questions_about_facts_that_are_hidden_in_them(embedded: SpecStackGenerator) -> None:
    document = "".join(TEXT.format(number) for number in range(30))
    prompts = document_prompts({"harbour.txt": document}, embedded.tokenizer, 16384)
    assert len(prompts) == 4
    lines = document.strip().split("\n")
    for prompt in prompts:
        assert [line for line in prompt.split("\n") if line in lines] == lines
    assert prompts == document_prompts({"other name": document}, embedded.tokenizer, 16384)
    last, first, formatted, summary = (set(prompt.split("\n")) - {*lines, ""} for prompt in prompts)
    # A hidden line and a question; the format's lines; the request for a summary.
    assert [len(each) for each in (last, first, summary)] == [2, 2, 1]
    assert len(formatted) > 5
    for prompt, extra in ((prompts[0], last), (prompts[1], first)):
        (question,) = [line for line in extra if line.endswith("?")]
        (fact,) = extra - {question}
        assert prompt.endswith(question) or prompt.startswith(question)
        assert len({*question.lower().rstrip("?").split()} & {*fact.lower().rstrip(".").split()}) >= 2
    short = document_prompts({"harbour.txt": document}, embedded.tokenizer, 200)
    assert len(short[3]) < len(prompts[3]) / 2
    with pytest.raises(ValueError, match=r"empty\.txt is empty"):
        document_prompts({"empty.txt": " \n"}, embedded.tokenizer, 16384)


def test_the_report_is_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"text": f"{CODE}What does step_7 return?"}) + '\n{"text": "short"}\n')
    command = ["doctor", "--measure", "--prompts", str(path), "--keep-rates", "0.4", "1.0", "--device", "cpu"]
    assert main(command) == 0
    captured = capsys.readouterr()
    for label in ("TTFT speed-up", "perplexity ratio", "fastest within 2%", "left out: prompt 2", "dense:", "answers"):
        assert label in captured.out
    assert "[  1/2]" in captured.err
    assert (tmp_path / "prompts.measured.jsonl").exists()
    assert main([*command, "--max-dropped-attention", "0"]) == 0
    (checked,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["checked"]]
    assert checked.split()[1:3] == ["100%", "100%"]
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    assert "[  1/2]" not in captured.err
    found = json.loads(captured.out)["fidelity"]
    assert [each["setting"] for each in found["settings"]] == ["0.4", "1", "calibrated"]
    assert found["settings"][1]["kept"] == 1
