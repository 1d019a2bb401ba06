"""What can be known before a server runs, the commands that the documentation shows, and an engine without a server."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import ROOT, blocks

from .conftest import ASSETS, ENVIRONMENT, Reference, generate_body

_PAIR = ("--model-path", str(ASSETS / "target"), "--speculative-draft-model-path", str(ASSETS / "draft"))
_SPEC_STACK = ("--speculative-algorithm", "SPEC_STACK")
_CPU = ("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--mem-fraction-static", "0.3")


def _python(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as a user would: SGLang settles things once per process."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **ENVIRONMENT, "SPEC_STACK_SGLANG": "{}", "PYTHONPATH": str(ROOT), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def _doctor(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = _python(["-m", "spec_stack", "doctor", "--json", "--sglang", "--", *arguments], folder)
    assert done.stdout, done.stderr[-2000:]
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_doctor_says_what_a_launch_would_do(tmp_path: Path) -> None:
    flags = ("--spec-stack-min-prompt-tokens", "500", "--spec-stack-gammas", "0", "3")
    target = shutil.copytree(ASSETS / "target", tmp_path / "target")
    (target / "generation_config.json").write_text('{"repetition_penalty": 1.05}')
    pair = ("--model-path", str(target), *_PAIR[2:])
    code, report = _doctor(tmp_path, *pair, *_SPEC_STACK, *_CPU, *flags)
    assert (code, report["problem"]) == (0, None)
    assert "of those with 500 or more tokens that are not cached" in report["prompts"]
    assert report["drafting"] == "policy throughput, gammas [0, 3]"
    assert report["vocabularies"].startswith("4096 embedding rows")
    assert report["CUDA graphs"] == "none"
    assert re.match(r"65536 tokens of \d+ bytes, \d\.\d\d GB on each rank, or a tenth", report["draft's pool"])
    assert any("repetition_penalty 1.05" in it and "--sampling-defaults openai" in it for it in report["warnings"])


@pytest.mark.nightly
def test_the_doctor_knows_a_scoring_model_with_another_algorithm(tmp_path: Path) -> None:
    scoring = ("--spec-stack-scoring-model", str(ASSETS / "draft"))
    for algorithm, drafting in (((), "none"), (("--speculative-algorithm", "NGRAM"), "NGRAM")):
        code, report = _doctor(tmp_path, *_PAIR[:2], *scoring, *algorithm, *_CPU)
        assert (code, report["problem"], report["drafting"]) == (0, None, f"{drafting}, by SGLang itself")
        assert "PROMPTS ARE PRUNED" in report["prompts"]
        assert report["vocabularies"].startswith("4096 embedding rows")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((*_PAIR, *_SPEC_STACK, *_CPU, "--spec-stack-keep-rate", "2"), "keep_rate must be in (0, 1]"),
        (
            (*_PAIR, *_SPEC_STACK, *_CPU, "--spec-stack-sparse-prefill", "draft_only", "--page-size", "16"),
            "--page-size 1 can; leave it out",
        ),
        ((*_PAIR, *_CPU), "add --speculative-algorithm SPEC_STACK"),
        ((*_PAIR, "--spec-stack-keeprate", "1"), "unrecognized arguments: --spec-stack-keeprate"),
    ],
)
def test_the_doctor_says_why_a_launch_would_end(tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    code, report = _doctor(tmp_path, *arguments)
    assert code == 1
    assert problem in report["problem"]


@pytest.mark.nightly
def test_the_doctor_tells_padded_embeddings_from_another_tokenizer(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(ASSETS / "draft", draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 64}))
    arguments = ("--model-path", str(ASSETS / "target"), "--speculative-draft-model-path", str(draft))
    code, report = _doctor(tmp_path, *arguments, *_SPEC_STACK, *_CPU)
    assert (code, "the draft's are fitted to the target's" in report["vocabularies"]) == (0, True), report
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "target" / name, draft / name)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, report = _doctor(tmp_path, *arguments, *_SPEC_STACK, *_CPU)
    assert code == 1
    assert "another tokenizer than the target" in report["problem"]


_ENGINE = """
import json, sys
import sglang as sgl

if __name__ == "__main__":
    asked = json.load(open(sys.argv[1]))
    engine = sgl.Engine(**asked["engine"])
    reply = engine.generate(input_ids=asked["input_ids"], sampling_params=asked["sampling_params"])
    print("reply: " + json.dumps({"ids": reply["output_ids"], "report": reply["meta_info"]["spec_stack"]}))
    engine.shutdown()
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_an_engine_without_a_server_takes_its_settings_from_the_environment(
    tmp_path: Path, reference: Reference
) -> None:
    """A file named there, and what goes over it."""
    prompt = reference.prompt(500, seed=3)
    (tmp_path / "settings.json").write_text(json.dumps({"keep_rate": 0.9, "min_prompt_tokens": 100, "gammas": [0, 3]}))
    engine = {
        **{"device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch"},
        **{"grammar_backend": "none", "disable_cuda_graph": True, "sleep_on_idle": True},
        **{"mem_fraction_static": 0.1, "max_total_tokens": 8000},
        "model_path": str(ASSETS / "target"),
        "speculative_draft_model_path": str(ASSETS / "draft"),
        "speculative_algorithm": "SPEC_STACK",
    }
    body = {key: value for key, value in generate_body(prompt, 24).items() if key != "stream"}
    (tmp_path / "asked.json").write_text(json.dumps({"engine": engine, **body}))
    (tmp_path / "engine.py").write_text(_ENGINE)
    settings = json.dumps({"config": str(tmp_path / "settings.json"), "keep_rate": 0.3, "calibration": "none"})
    done = _python(["engine.py", "asked.json"], tmp_path, SPEC_STACK_SGLANG=settings)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("reply: ")] or [done.stderr[-3000:]]
    reply = json.loads(line.removeprefix("reply: "))
    assert reply["ids"] == reference.tokens(prompt, sparse_prefill="on", keep_rate=0.3)
    assert reply["report"]["sparse_prefill"] is True
    assert set(reply["report"]["gamma_trace"]) <= {0, 3}


def _commands() -> list[list[str]]:
    """Every shell command of the pages about serving, in words."""
    found = []
    for page in ("serving.md", "operations.md"):
        for block in blocks(ROOT / "docs" / page):
            if block.language == "bash":
                found += [shlex.split(line) for line in block.code.replace("\\\n", " ").splitlines() if line.strip()]
    return found


@pytest.fixture
def environment() -> Iterator[Mapping[str, str]]:
    """As it was, afterwards: flags of ours are left in it."""
    before = dict(os.environ)
    yield before
    os.environ.clear()
    os.environ.update(before)


def test_sglang_takes_every_launch_that_the_page_shows(environment: Mapping[str, str]) -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    parsed = []
    for words in _commands():
        if "--speculative-algorithm" in words or "--spec-stack-scoring-model" in words:
            parsed.append(prepare_server_args(words[words.index("--model-path") :]))
    assert len(parsed) >= 5
    assert {args.speculative_algorithm for args in parsed} == {"SPEC_STACK", "NGRAM", None}
    assert all(args.speculative_draft_model_path for args in parsed if args.speculative_algorithm == "SPEC_STACK")


def test_a_server_without_the_plugins_hooks_refuses_to_start(launch: Any) -> None:
    """The test support puts one hook out of action, as a failed import would."""
    server = launch(wait=False, environment={"SPEC_STACK_TEST_BREAK_HOOK": "1"})
    assert server.exit_code() != 0
    assert "SPEC_STACK cannot serve: SGLang did not apply its hooks on" in server.log.read_text()
