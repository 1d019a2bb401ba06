"""One prompt, one selection: the kept lines of a document are the same at every entry point of Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import pipeline

from spec_stack import Pruner, SpecStackConfig, SpecStackGenerator, with_draft
from spec_stack.hf.loading import ASSETS
from tests.entry_points.conftest import Expected
from tests.entry_points.prompts import (
    ANSWER,
    DOCUMENT,
    GIVEN,
    NAMES,
    PREFILL,
    RATE,
    ROWS,
    Reads,
    Row,
    ids_of,
    lines_of,
    lines_of_prompt,
)
from tests.support.retokenize import drop_merges


def kept_by(generator: SpecStackGenerator, row: Row, given: str, way: str) -> frozenset[str]:
    """The lines that the target reads of a prompt."""
    options: dict[str, Any] = {**GIVEN[given](generator, row), "max_tokens": 1}
    reads = Reads(generator)
    with reads.of():
        if way == "generate":
            generator.generate(**options)
        elif way == "stream":
            list(generator.stream(**options))
        elif way == "session":
            with generator.session() as session:
                session.generate(**options)
        elif way.startswith("loaded models"):
            tokenizer = generator.tokenizer if way == "loaded models, tokenizer" else None
            made = SpecStackGenerator(generator.target, generator.draft, tokenizer, config=SpecStackConfig(PREFILL))
            made.generate(**options)
        else:
            tokenizer = generator.tokenizer if way == "with_draft, tokenizer" else None
            custom = with_draft(generator.draft, config=SpecStackConfig(PREFILL), tokenizer=tokenizer)
            if way == "pipeline":
                pipe = pipeline("text-generation", model=generator.target, tokenizer=generator.tokenizer)
                pipe(row.said, max_new_tokens=1, do_sample=False, custom_generate=custom)
            else:
                ids = torch.tensor([ids_of(generator, row)])
                generator.target.generate(ids, max_new_tokens=1, do_sample=False, custom_generate=custom)
    return lines_of(reads.text())


WAYS = [
    ("text", "generate"),
    ("ids", "generate"),
    ("messages", "stream"),
    ("messages", "session"),
    ("ids", "session"),
    ("messages", "loaded models"),
    ("messages", "loaded models, tokenizer"),
    ("ids", "with_draft"),
    ("ids", "with_draft, tokenizer"),
    ("messages", "pipeline"),
]
# What these take as the arguments of `model.generate` names no protected spans, tools or question.
TAKES_NO_OPTIONS = ("with_draft", "with_draft, tokenizer", "pipeline")


@pytest.mark.parametrize("name", ROWS)
def test_generate_keeps_a_part_that_has_the_evidence(expected: Expected, name: str) -> None:
    row, kept = ROWS[name], expected(name)
    assert len(kept) < 0.6 * len(DOCUMENT.splitlines())
    last = row.question or row.text or row.messages[-1]["content"]
    wanted = max(NAMES, key=last.rfind)
    assert any(line.startswith(f"The locker of {wanted} ") for line in kept)
    if name == "a long answer":
        assert kept.issuperset(ANSWER)


CELLS = [
    (name, given, way)
    for name, row in ROWS.items()
    for given, way in WAYS
    if way not in TAKES_NO_OPTIONS or not (row.protected or row.question or (row.options and way == "pipeline"))
]


@pytest.mark.parametrize(("name", "given", "way"), CELLS)
def test_every_call_keeps_the_same_lines(
    generator: SpecStackGenerator, expected: Expected, name: str, given: str, way: str
) -> None:
    assert kept_by(generator, ROWS[name], given, way) == expected(name)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.options])
def test_a_pruner_keeps_the_same_lines(pruner: Pruner, expected: Expected, name: str) -> None:
    row = ROWS[name]
    protect = [row.protected] if row.protected else []
    shorter = pruner.prune(row.said, question=row.question, protect=protect, keep_rate=RATE).messages
    assert lines_of_prompt(shorter) == expected(name)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> SpecStackGenerator:
    """A draft with another tokenizer, which lies beside it."""
    folder = tmp_path_factory.mktemp("draft")
    drop_merges(ASSETS / "draft", folder, 0.1, seed=0, tokenizer_from=ASSETS / "target")
    return SpecStackGenerator.from_pretrained(
        ASSETS / "target", folder, device="cpu", precision="fp32", config=SpecStackConfig(PREFILL)
    )


@pytest.mark.parametrize(("given", "way"), WAYS)
@pytest.mark.parametrize("name", ["plain text", "chat"])
def test_a_draft_of_another_tokenizer(foreign: SpecStackGenerator, name: str, given: str, way: str) -> None:
    """A Pruner, which has no target, counts and cuts by the draft's tokens, and is left out."""
    assert foreign.pair.translation is not None
    expected = kept_by(foreign, ROWS[name], "messages", "generate")
    assert 0 < len(expected) < 0.6 * len(DOCUMENT.splitlines())
    assert kept_by(foreign, ROWS[name], given, way) == expected
