"""`spec-stack prune`: text and messages in, shorter ones out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from spec_stack.cli.main import main

CODE = (Path(__file__).parents[1] / "support" / "other_code_to_prune.txt").read_text()


def test_a_text_from_standard_input_is_shortened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(CODE))
    line = ["prune", "--keep-rate", "0.3", "--question", "Why?", "--marker", "[gap]", "--explain", "--device", "cpu"]
    assert main(line) == 0
    captured = capsys.readouterr()
    assert "[gap]\n" in captured.out
    assert set(captured.out.replace("[gap]", "").split()) <= set(CODE.split())
    assert len(captured.out) < len(CODE) / 2
    assert captured.err.startswith("kept ")
    assert "message 0: characters 0-" in captured.err


def test_bytes_on_standard_input_that_are_no_text_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\udcff\udcfe"))
    assert main(["prune", "-", "--max-tokens", "20", "--device", "cpu"]) == 2
    assert "not valid Unicode" in capsys.readouterr().err


def test_half_a_character_in_json_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "body.json"
    path.write_text('[{"role": "user", "content": "half a pair \\ud800"}]')
    assert main(["prune", str(path), "--max-tokens", "200", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())


def test_json_has_the_counts_and_other_json_is_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.json"
    path.write_text('[{"name": "x"}]')
    assert main(["prune", str(path), "--json", "--device", "cpu"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["messages"] == '[{"name": "x"}]'
    assert result["num_kept_tokens"] == result["num_tokens"]
    assert "shorter than min_prompt_tokens" in result["reason"]


@pytest.mark.parametrize(
    ("said", "more", "message"),
    [
        (CODE, ["--keep-rate", "7"], "keep_rate"),
        (CODE, ["--max-tokens", "0"], "max_tokens must be 1 or more"),
        (CODE, ["--draft", "/nowhere"], "neither a folder nor a hub id"),
        (b"\xff\xfe", [], "is not UTF-8 text"),
        (json.dumps({"messages": [{"role": "user", "content": CODE}], "spec_stack": {}}), [], "give --keep-rate"),
        *(
            (json.dumps({"messages": each}), [], '"messages" must be a list')
            for each in (3, "text", None, {"role": ""})
        ),
    ],
)
def test_errors_say_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str | bytes, more: list[str], message: str
) -> None:
    path = tmp_path / "said"
    path.write_bytes(said if isinstance(said, bytes) else said.encode())
    assert main(["prune", str(path), "--device", "cpu", *more]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("is_piped", [False, True], ids=["a file", "standard input"])
def test_a_byte_order_mark_is_no_text_and_line_ends_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_piped: bool
) -> None:
    chat = json.dumps([{"role": "user", "content": CODE}])
    out = {}
    for name, text in {"chat": chat, "text": CODE.replace("\n", "\r\n")}.items():
        data = b"\xef\xbb\xbf" + text.encode()
        (tmp_path / name).write_bytes(data)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        assert main(["prune", "-" if is_piped else str(tmp_path / name), "--keep-rate", "0.3", "--device", "cpu"]) == 0
        out[name] = capsys.readouterr().out
    (message,) = json.loads(out["chat"])
    assert message["role"] == "user"
    assert len(message["content"]) < len(CODE) / 2
    assert out["text"].startswith(CODE[:10])
    assert out["text"].count("\r\n") == out["text"].count("\n") > 5


TEXT = "".join(f"The code of room {at} is {4 * at}.\n" for at in range(90)) + "What is the code of room 71?"
BODIES: list[Any] = [
    [{"role": "user", "content": TEXT}],
    {"model": "m", "prompt": TEXT, "max_tokens": 5},
    {"model": "m", "prompt": [TEXT]},
    {"model": "m", "input": TEXT, "instructions": "Be short."},
    {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]},
    {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}, {"type": "x_output", "output": TEXT}]},
    {"system": "x", "messages": [{"role": "user", "content": [{"type": "tool_result", "content": TEXT}]}]},
    {"messages": [{"role": "user", "content": TEXT}], "tools": [{"type": "custom", "custom": {"name": "f"}}]},
]


def texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in values for text in texts(each)]


@pytest.mark.parametrize("body", BODIES)
def test_a_requests_body_keeps_its_form(tmp_path: Path, capsys: pytest.CaptureFixture[str], body: Any) -> None:
    path = tmp_path / "body.json"
    path.write_text(json.dumps(body))
    assert main(["prune", str(path), "--keep-rate", "0.2", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    shorter = json.loads(captured.out)
    assert type(shorter) is type(body)
    assert isinstance(body, list) or shorter.keys() == body.keys()
    (kept,) = [text for text in texts(shorter) if "room" in text]
    assert [text for text in texts(shorter) if text != kept] == [text for text in texts(body) if text != TEXT]
    assert set(kept.splitlines()) <= {*TEXT.splitlines(), "", "…"}
    assert "room 71 is 284." in kept
    assert captured.err.startswith("spec-stack: kept ")
    assert main(["prune", str(path), "--keep-rate", "0.2", "--device", "cpu", "--quiet", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["messages"] == shorter
    assert captured.err == ""
    assert main(["prune", str(path), "--max-tokens", "250", "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out) < len(json.dumps(body)) / 2


def test_a_json_string_stays_one_and_other_json_that_breaks_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps(TEXT))
    assert main(["prune", str(path), "--keep-rate", "0.2", "--device", "cpu"]) == 0
    assert set(json.loads(capsys.readouterr().out).splitlines()) <= {*TEXT.splitlines(), "", "…"}
    path.write_text(json.dumps({"rows": [{"name": f"name {at}", "age": at} for at in range(200)]}, indent=1))
    assert main(["prune", str(path), "--keep-rate", "0.1", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert "this JSON is no request's body" in captured.err
    path.write_text("[" * 100_000)
    assert main(["prune", str(path), "--max-tokens", "1", "--device", "cpu"]) == 0
    assert "over max_tokens=1" in capsys.readouterr().err
