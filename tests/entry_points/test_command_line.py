"""One prompt, one selection: in the command line, and in lm-eval's model, as in `generate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_stack import SpecStackGenerator
from spec_stack.cli.main import main
from tests.entry_points.conftest import Expected
from tests.entry_points.prompts import RATE, ROWS, Reads, lines_of, lines_of_prompt, rendered

PAIR = ("--device", "cpu")
TYPED = ("--precision", "fp32")
PRUNED = ("--keep-rate", str(RATE), "--sparse-prefill", "on", "--max-tokens", "1", "--quiet")
# What the command line takes: a system message and one request.
PROMPTS = [name for name, row in ROWS.items() if len(row.messages) in (0, 2) and not row.options and not row.protected]


@pytest.mark.parametrize("name", PROMPTS)
def test_generate(generator: SpecStackGenerator, expected: Expected, tmp_path: Path, name: str) -> None:
    row, file = ROWS[name], tmp_path / "prompt.txt"
    system = ("--system", row.messages[0]["content"]) if row.messages else ("--raw",)
    file.write_text(row.messages[1]["content"] if row.messages else row.text)
    question = () if row.question is None else ("--question", row.question)
    reads = Reads(generator)
    with reads.of():
        assert main(["generate", *PAIR, *TYPED, *PRUNED, "--file", str(file), *system, *question]) == 0
    assert lines_of(reads.text()) == expected(name)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.options])
def test_prune(expected: Expected, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    row, file = ROWS[name], tmp_path / "prompt"
    file.write_text(json.dumps(list(row.messages)) if row.messages else row.text)
    options = [] if row.question is None else ["--question", row.question]
    options += ["--protect", row.protected] if row.protected else []
    assert main(["prune", *PAIR, "--keep-rate", str(RATE), "--quiet", *options, str(file)]) == 0
    shown = capsys.readouterr().out
    assert lines_of_prompt(json.loads(shown) if row.messages else shown) == expected(name)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.protected and not row.question])
def test_lm_eval(generator: SpecStackGenerator, expected: Expected, name: str) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.api.instance import Instance

    from examples.lm_eval_harness import SpecStackLM

    model = SpecStackLM(device="cpu", precision="fp32", keep_rate=RATE, sparse_prefill="on")
    reads = Reads(generator)
    args = (rendered(generator, ROWS[name]), {"until": [], "max_gen_toks": 1})
    with reads.of():
        model.generate_until([Instance("generate_until", {}, args, 0)])
    assert lines_of(reads.text()) == expected(name)
