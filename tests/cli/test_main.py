from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spec_stack import PrefillConfig, SpecStackGenerator, __version__
from spec_stack.bench.demo import hide_fact, run_demo
from spec_stack.calibrate.documents import MODULES
from spec_stack.cli.arguments import answer_options, build_parser, config_of, prompt_of, request_of
from spec_stack.cli.main import describe_pruning, main
from spec_stack.cli.progress import ProgressLine
from spec_stack.cli.reports import format_demo
from spec_stack.config import LoadConfig
from tests.support.nightly import others_nightly

NOWHERE = ("--target", "./nowhere", "--draft", "./nowhere")


def test_the_defaults_are_those_of_the_configuration() -> None:
    arguments = build_parser().parse_args(["generate", "x"])
    assert config_of(PrefillConfig, arguments) == PrefillConfig()
    assert config_of(PrefillConfig, arguments).given == ()
    assert config_of(LoadConfig, arguments) == LoadConfig()
    assert answer_options(arguments) == {}


def test_a_server_says_what_is_pruned_and_at_which_rate() -> None:
    assert describe_pruning(PrefillConfig(sparse_prefill="off")) == "prompts are read whole"
    curve = PrefillConfig(sparse_prefill="on", keep_rate=((2048, 0.3), (8192, 0.1)))
    rates = "0.3 at 2048 tokens, 0.1 at 8192 tokens"
    assert describe_pruning(curve) == f"of every prompt a share of {rates} is kept, which is lossy"


def test_every_option_of_the_command_line_arrives() -> None:
    line = "generate hello --system S --max-tokens 3 --temperature 0.5 --top-k 4 --top-p 0.6 --seed 7 --stop a --stop b"
    line += " --sparse-prefill off --positions contiguous"
    more = "--ignore-eos --keep-rate 0.3 --min-prompt-tokens 9 --look-ahead 2 --gamma 5 --proposer both"
    more += " --min-p 0.1 --repetition-penalty 1.2 --min-tokens 2 --sampling model --regex a+"
    arguments = build_parser().parse_args([*line.split(), *more.split()])
    request, prefill = request_of(arguments), config_of(PrefillConfig, arguments)
    assert (prefill.keep_rate, prefill.min_prompt_tokens, prefill.look_ahead) == (0.3, 9, 2)
    assert prefill.positions == "contiguous"
    assert prompt_of(arguments, "hello", False) == {
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "hello"}]
    }
    assert request == {
        "response_format": {"type": "regex", "pattern": "a+"},
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "sampling": "model",
        "max_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.6,
        "seed": 7,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "sparse_prefill": "off",
        "gamma": 5,
        "proposer": "both",
    }


def test_both_precisions_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--precision", "nf4", "--draft-precision", "bf16", "--device", "cpu"]
    assert main(["generate", "def main():", "--max-tokens", "4", "--json", *options]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert (metrics["precision"], metrics["draft_precision"]) == ("nf4", "bf16")
    assert main(["doctor", "--json", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["target"]["precision"], report["draft"]["precision"]) == ("nf4", "bf16")


@pytest.mark.slow
@pytest.mark.nightly
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spec_stack.cli.main", "generate", "def main():", "--raw", "--max-tokens", "120"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    errors = child.stderr.read().decode()
    child.stderr.close()
    assert child.wait(timeout=600) in (0, 141)
    assert "Traceback" not in errors
    assert "Exception" not in errors


@pytest.mark.slow
def test_generate_streams_what_the_library_gives(
    embedded: SpecStackGenerator, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "def read_lines(path):\n"
    expected = embedded.generate(prompt, max_tokens=20).text + "\n"
    file = tmp_path / "prompt.txt"
    file.write_text(prompt)
    for source in ([prompt], ["--file", str(file)], [], ["--file", "-"]):
        monkeypatch.setattr("sys.stdin", io.StringIO(prompt))
        assert main(["generate", *source, "--raw", "--max-tokens", "20", "--device", "cpu"]) == 0
        assert capsys.readouterr().out == expected


@pytest.mark.slow
def test_a_chat_models_template_is_used_unless_raw_is_asked_for(
    embedded: SpecStackGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    question = "Say yes."
    common = ["--max-tokens", "20", "--device", "cpu"]
    answer = embedded.generate(messages=[{"role": "user", "content": question}], max_tokens=20).text
    going_on = embedded.generate(question, max_tokens=20).text
    assert answer != going_on
    for flags, expected in ((["--chat"], answer), ([], answer), (["--raw"], going_on)):
        assert main(["generate", question, *flags, *common]) == 0
        assert capsys.readouterr().out == expected + "\n"
    assert prompt_of(build_parser().parse_args(["generate", "x"]), "x", is_chat_model=False) == {"prompt": "x"}
    assert main(["generate", "x", "--raw", "--system", "S"]) == 2
    assert "--raw leaves out" in capsys.readouterr().err


def test_a_schema_file_shapes_the_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    path = tmp_path / "schema.json"
    path.write_text(
        '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, '
        '"required": ["n"], "additionalProperties": false}'
    )
    command = ["generate", "A number.", "--device", "cpu", "--max-tokens", "40", "--json", "--json-schema", str(path)]
    assert main(command) == 0
    answer = json.loads(capsys.readouterr().out)
    assert 0 <= json.loads(answer["text"])["n"] <= 9
    assert len(answer["token_ids"]) == answer["metrics"]["num_tokens"]
    path.write_text("no")
    assert main(command) == 2
    captured = capsys.readouterr()
    assert "is not JSON" in captured.err
    assert "is not JSON" in json.loads(captured.out)["error"]


def test_a_missing_library_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spec_stack.api.generator", None)
    assert main(["generate", "x"]) == 2
    captured = capsys.readouterr()
    assert "spec_stack.api.generator" in captured.err
    assert captured.err.count("\n") == 1


def test_an_error_beside_an_output_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sys.stdout", Full())
    assert main(["generate", "   ", "--json"]) == 2
    assert capsys.readouterr().err == "spec-stack: error: the prompt is empty\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_line_waits_and_leaves_nothing_behind() -> None:
    quiet, shown, file = Terminal(), Terminal(), io.StringIO()
    for out, wait_s in ((quiet, 60.0), (shown, 1e-9), (file, 1e-9)):
        line = ProgressLine(out, wait_s)
        for phase, total in (("scoring", 100), ("prefill", 20)):
            for done in (0, total // 2, total):
                line(done, total, phase)
                time.sleep(0.11)
    assert quiet.getvalue() == file.getvalue() == ""
    assert "scoring:  50%" in shown.getvalue()
    assert "50/100" in shown.getvalue()
    assert "10/20" in shown.getvalue()
    assert "".join(shown.getvalue().rsplit("\r", 2)[1:]).strip() == ""
    # Of an interrupted prefill too.
    out = Terminal()
    line = ProgressLine(out, 1e-9)
    line(0, 8000, "scoring")
    time.sleep(0.11)
    line(4000, 8000, "scoring")
    line.clear()
    line.clear()
    assert "4000/8000" in out.getvalue()
    assert out.getvalue().rsplit("\r", 2)[1].strip() == ""


def test_help_and_version_tell_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (["--version"], __version__),
        (["--help"], "examples:"),
        (["generate", "--help"], "spec-stack generate --file module.py"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 0
        assert text in capsys.readouterr().out
    run = subprocess.run([sys.executable, "-m", "spec_stack", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"spec-stack {__version__}"
    assert main(["generate", "x", "--policy", "nope"]) == 2
    message = capsys.readouterr().err
    assert "throughput" in message
    assert not any(offline in message for offline in ("best-fixed", "task-oracle", "batch-throughput"))


def test_json_carries_text_and_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "Hello", "--system", "Be brief.", "--max-tokens", "8", "--gamma", "2", "--json"]
    assert main([*command, "--sparse-prefill", "on", "--keep-rate", "0.5"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["finish_reason"] in ("eos", "length")
    assert answer["metrics"]["num_tokens"] <= 8
    assert answer["metrics"]["sparse_prefill_reason"].startswith("off: no more than")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "   "], "prompt is empty"),
        (["generate", "half a pair \ud800"], "not valid Unicode"),
        (["generate", "x", "--device", "meta"], "cannot run a model"),
        (["generate", "--file", "missing.txt"], "cannot read missing.txt"),
        *((["generate", "x", flag, os.devnull], f"{os.devnull} is empty") for flag in ("--file", "--json-schema")),
        *(
            ([command, *more, os.devnull], f"{os.devnull} is empty")
            for command, *more in (["chat", "--file"], ["prune"])
        ),
        (["generate", "x", "--regex", "("], "this regex cannot be compiled: at 1(8): invalid regex"),
        (["generate", "x", "--keep-rate", "2"], "keep_rate"),
        (["generate", "x", "--max-tokens", "99999"], "positions"),
        (["generate", "x", *NOWHERE], "neither a folder nor a hub id"),
        (["generate", "x", "--draft-precision", "int3"], "unknown draft_precision"),
        (["generate", "x", "--keep-rate", "2048:0.3,512:0.9"], "must increase"),
        (["explain", "x", "--out", "."], "cannot write .: it is a folder"),
        (["explain", "x", "--demo"], "--demo explains a prompt of its own"),
        (["calibrate", "--out", "nowhere/mine.json"], "; nowhere is no folder"),
        (["calibrate", "--out", "/proc/mine.json"], "cannot write /proc/mine.json"),
        (["demo", "--repeats", "0"], "--repeats"),
        (["demo", "--tokens", "99999"], "fewer than"),
        (["demo", "--tokens", "16384"], "positions; ask for less"),
        # Before the models are loaded: this pair would be refused next.
        (["generate", "x", "--temperature", "-1", *NOWHERE], "temperature must be"),
        (["generate", "x", "--json-schema", "missing.json", *NOWHERE], "cannot read missing.json"),
        (["chat", "--gamma", "17", *NOWHERE], "gamma must be"),
        (["explain", "x", "--top-p", "2", "--out", "page.html", *NOWHERE], "top_p must be"),
        # By the parser.
        (["generate", "x", "--n", "3"], "unrecognized arguments: --n 3"),
        (["generate", "x", "--scoring-heads", "1"], "--scoring-heads: must be LAYER.HEAD,…|none, got '1'"),
        (["generate", "x", "--draft-window", "8192:"], "--draft-window: must be N|FROM:N|none, got '8192:'"),
        (["generate", "x", "--keep-rate", "2048:"], "--keep-rate: must be X|LENGTH:X,…, got '2048:'"),
        (["generate", "x", "--top-k", "few"], "--top-k: must be N, got 'few'"),
    ],
)
def test_bad_input_ends_with_status_2_and_the_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(arguments)
    except SystemExit as exit_info:
        status = exit_info.code
    assert status == 2
    shown = capsys.readouterr().err
    assert message in shown.splitlines()[-1]
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "FILE"],
        ["bench", "--prompts", "FILE"],
        ["prune", "FILE"],
        ["generate", "--file", "FILE"],
        ["explain", "--file", "FILE", "Why?"],
        ["chat", "--file", "FILE"],
        ["doctor", "--measure", "--prompts", "FILE"],
        ["doctor", "--measure", "--documents", "FILE"],
        ["calibrate", "--out", "made.json", "--max-loss", "0.1", "--loss-prompts", "FILE"],
        ["generate", "x", "--calibration", "FILE"],
        ["proxy", "--upstream", "http://127.0.0.1:1", "--config", "FILE"],
    ],
)
@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet"])
def test_a_file_that_is_missing_is_named_in_one_line(
    arguments: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([name if each == "FILE" else each for each in arguments]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "No such file or directory" in said
    assert "Errno" not in said
    assert said.count(name) == 1


@pytest.mark.parametrize("name", ["empty.jsonl", "words.jsonl", "bytes.jsonl", "bytes.parquet"])
def test_a_file_of_something_else_is_named_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"empty": b"", "words": b"no JSON\n", "bytes": b"\xff\xfe\x00\n"}
    Path(name).write_bytes(content[Path(name).stem])
    for arguments in (["bench", name], ["bench", "--prompts", name], ["doctor", "--measure", "--prompts", name]):
        assert main(arguments) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"spec-stack: error: {name}")
        assert len(said) < 200


@pytest.mark.parametrize("seed", range(len(MODULES)))
def test_a_hidden_fact_stands_once_in_a_document_of_the_asked_length(embedded: SpecStackGenerator, seed: int) -> None:
    fact = hide_fact(embedded.tokenizer, 3000, seed)
    assert fact.document.count(f"is {fact.answer}.") == 1
    assert fact == hide_fact(embedded.tokenizer, 3000, seed)
    num_tokens = len(embedded.tokenizer(fact.document).input_ids)
    assert 3000 <= num_tokens <= 3060
    assert 0 <= fact.depth < 1


@pytest.mark.slow
def test_the_demo_reports_both_modes_side_by_side() -> None:
    report = run_demo(SpecStackGenerator.from_pretrained(), num_tokens=1000, seed=0, repeats=1)
    dense, sparse = report["modes"].values()
    assert dense["keep_rate"] == 1.0
    assert 0.15 < sparse["keep_rate"] < 0.25
    assert dense["acceptance_rate"] is None
    assert report["lossless"] is True
    table = format_demo(report)
    for label in ("time to first token", "decoding", "share of the prompt kept", "accepted", "Q: What is the"):
        assert label in table


@pytest.mark.parametrize(
    ("encoding", "text"),
    others_nightly(
        [
            *(("ascii", text) for text in ("naïve", "€ 5 … 中文", "🚀")),
            *((encoding, "€ 5 … 中文") for encoding in ("latin-1", "cp1252", "utf-8", "utf-16")),
        ],
        usual=[("ascii", "🚀"), ("cp1252", "€ 5 … 中文"), ("utf-16", "€ 5 … 中文")],
    ),
)
def test_a_standard_output_of_any_encoding_loses_no_character(
    monkeypatch: pytest.MonkeyPatch, encoding: str, text: str
) -> None:
    def said(*flags: str) -> str:
        out = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr("sys.stdout", out)
        main(["generate", "x", "--raw", "--regex", text, "--max-tokens", "40", "--device", "cpu", *flags])
        out.flush()
        return out.buffer.getvalue().decode(encoding)

    assert json.loads(said("--json"))["text"] == text
    assert json.loads(said("--json", "--file", f"/nowhere/{text}"))["error"].count(text)
    assert said() == text.encode(encoding, "backslashreplace").decode(encoding) + "\n"


def test_generate_says_that_text_was_dropped_and_takes_a_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rooms.txt"
    path.write_text("".join(f"The code of room {at} is {4 * at}.\n" for at in range(60)) + "Answer.")
    line = ["generate", "--file", str(path), "--max-tokens", "2", "--device", "cpu", "--keep-rate", "0.3"]
    pruned = [*line, "--sparse-prefill", "on", "--question", "What is the code of room 41?"]
    assert main(pruned) == 0
    told = capsys.readouterr().err
    assert re.fullmatch(r"spec-stack: kept \d+ of \d+ prompt tokens; .*--quiet hides this line", told.splitlines()[-1])
    assert main([*pruned, "--stats"]) == 0
    assert "TTFT" in capsys.readouterr().err
    for silent in ([*pruned, "--quiet"], [*line, "--sparse-prefill", "off", "--quiet"]):
        assert main(silent) == 0
        assert capsys.readouterr().err == ""
