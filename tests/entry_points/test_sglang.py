"""One prompt, one selection: as SGLang's scheduler plans it, from the token ids of its endpoints."""

from __future__ import annotations

import sys

import pytest

from spec_stack import SpecStackGenerator
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.scoring import gather_inputs
from spec_stack.sglang.decide import Decision, KnownTexts, Prompt, decide, decide_scored
from spec_stack.sglang.request import RequestOptions
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.types import Proposal
from tests.entry_points.conftest import Expected
from tests.entry_points.prompts import ROWS, Reads, by_ids, ids_of, lines_of, rendered


def planned(generator: SpecStackGenerator, known: KnownTexts, prompt: Prompt) -> Decision:
    """The plan for a prompt, scored by the draft."""
    needs = decide(prompt, known)
    if isinstance(needs, Decision):
        return needs
    inputs = ScoringInputs(known.text_of(needs.prompt))
    draft = generator.pair.new_draft_cache(prompt.config.prefill_chunk)
    scored, _ = gather_inputs(draft, inputs, lambda *_: Proposal(), prompt.config, first_query=needs.first_query)
    return decide_scored(needs, scored.importance, 0, known)


@pytest.mark.parametrize("endpoint", ["chat", "completions", "generate"])
@pytest.mark.parametrize("name", ROWS)
def test_the_scheduler_keeps_the_same_lines(
    generator: SpecStackGenerator, expected: Expected, name: str, endpoint: str
) -> None:
    row, tokenizer = ROWS[name], generator.tokenizer
    # Under completions SGLang's tokenizer adds its special tokens to a rendered chat too.
    ids = tokenizer(rendered(generator, row)).input_ids if endpoint == "completions" else ids_of(generator, row)
    protected = by_ids(generator, row).get("protected")
    options = RequestOptions(protect=protected and tuple(protected), question=row.question)
    known = KnownTexts(ServerConfig(), tokenizer, None, lambda prompt: 0, sys.maxsize)
    config = generator.config.prefill
    plan = planned(generator, known, Prompt(tuple(ids), None, None, config, "recall", frozenset(), options))
    kept = tokenizer.decode([ids[position] for position in plan.positions])
    if ids == ids_of(generator, row):
        assert lines_of(kept) == expected(name)
        return
    # A token more is another prompt: Python is given the same ids.
    reads = Reads(generator)
    with reads.of():
        options = {"protected": protected} if protected else {}
        generator.generate(input_ids=ids, question=row.question, max_tokens=1, **options)
    assert lines_of(kept) == lines_of(reads.text())
