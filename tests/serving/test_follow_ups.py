"""Conversations of which something was dropped: what stays, what comes back, by routes that share nothing with it."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.prefill.queries import WINDOW
from spec_stack.prefill.segments import line_borders
from spec_stack.tokenizers.prompt_reader import PromptReader
from spec_stack.tokenizers.vocabulary import Pieces
from tests.support import reference_question
from tests.support.reference import question_importance
from tests.support.reference_session import dropped_chunks_to_restore

from .conftest import (
    ASSETS,
    BY_CHUNKS,
    CONTEXT,
    MIN_PROMPT_TOKENS,
    Launcher,
    Reference,
    Server,
    kept_positions,
    report_of,
)


def _document(reference: Reference, num_tokens: int, seed: int) -> list[int]:
    """A prompt that shares no beginning with any other test's."""
    return [*random.Random(seed).choices(range(100, 1000), k=4), *reference.prompt(num_tokens, seed)]


def _first_turn(server: Server, reference: Reference, seed: int, **custom: Any) -> tuple[list[int], dict[str, Any]]:
    prompt = _document(reference, 1300, seed)
    return prompt, server.generate(
        prompt, 12, explain=True, **{"follow_up": "recall", "sparse_prefill": "on", **custom}
    )


def test_freeze_does_what_a_session_in_python_does_that_restores_nothing(server: Server, reference: Reference) -> None:
    """Turn by turn the same tokens, the same number of them kept; questions short and long."""
    texts = [reference.user_turn(30, 801), reference.user_turn(9, 802), reference.user_turn(600, 803)]
    prompt = _document(reference, 1300, 800)
    with reference.generator.session(SessionConfig(recall=False)) as session:
        for turn in range(4):
            options = {"sparse_prefill": "on"} if turn in (0, 3) else {}
            expected = session.generate(input_ids=prompt, max_tokens=12, gamma=0, ignore_eos=True, **options)
            reply = server.generate(prompt, 12, explain=True, follow_up="freeze", **options)
            report = report_of(reply)
            assert report["num_cached_tokens"] == expected.metrics.num_cached_tokens, turn
            assert reply["output_ids"] == list(expected.token_ids), turn
            going_on = [*prompt, *reply["output_ids"]]
            prompt = [*going_on, *texts[min(turn, 2)]]


@pytest.fixture(scope="module")
def eager_draft() -> Any:
    return AutoModelForCausalLM.from_pretrained(ASSETS / "draft", attn_implementation="eager", dtype=torch.float32)


@pytest.fixture(scope="module")
def by_chunks(launch: Launcher) -> Server:
    """A server that restores chunks by the heads of all layers, as the oracle does."""
    return launch(
        *("--max-total-tokens", "24000", "--chunked-prefill-size", "256", "--max-running-requests", "8"),
        *("--spec-stack-min-prompt-tokens", str(MIN_PROMPT_TOKENS), "--context-length", str(CONTEXT)),
        environment=BY_CHUNKS,
    )


@pytest.mark.parametrize(("num_new", "seed"), [(20, 875), (90, 875), (700, 880)])
def test_dropped_text_that_the_question_attends_to_or_shares_words_with_is_recalled(
    by_chunks: Server, reference: Reference, eager_draft: Any, num_new: int, seed: int
) -> None:
    """By attention matrices and lists, also where the new text is pruned itself."""
    server = by_chunks
    settings = server.state()["settings"]["recall"]
    prompt, first = _first_turn(server, reference, 870 + num_new)
    longer = [*prompt, *first["output_ids"], *reference.user_turn(num_new, seed)]
    reply = server.generate(longer, 8, explain=True, follow_up="recall")
    start = report_of(reply)["num_cached_tokens"]
    assert start == len(longer) - num_new - 1
    given = [*kept_positions(first), *range(len(prompt), start)]
    pieces = Pieces(reference.tokenizer).of(longer)
    text = PromptReader(reference.tokenizer).read(longer)
    roles = [turn.role for turn in text.turns]
    assert roles == ["user", "assistant", "user"]
    found = question = reference_question.question_of(pieces, line_borders(pieces), text.template, roles)
    if set(range(start, len(longer))) <= set(kept_positions(reply)):
        # New text that is not pruned is scored by its own queries.
        found = question.since(start + 1)
    wanted = question_importance(
        eager_draft,
        longer,
        found.repeated,
        found.in_place,
        found.asks,
        found.is_question,
        found.is_marked,
        mean=True,
    )
    chunks = [(at, min(at + PrefillConfig.chunk_size, start)) for at in range(0, start, PrefillConfig.chunk_size)]
    words = question.since(start).words()
    expected = dropped_chunks_to_restore(
        wanted.tolist(),
        given,
        start,
        PrefillConfig.chunk_size,
        settings["recall_threshold"],
        settings["max_recalled_chunks"],
        reference_question.shared(pieces, chunks, [-1] * len(chunks), words, short_word=0.5, power=0.5, most_units=6),
        settings["recall_word_threshold"],
    )
    assert kept_positions(reply)[: len(given) + len(expected)] == sorted([*given, *expected])
    assert len(expected) == report_of(reply)["num_recalled_tokens"] > 0
    assert reply["output_ids"] == reference.tokens_over(longer, report_of(reply)["kept_spans"], 8)


def test_afresh_a_reply_does_not_depend_on_what_the_server_remembers(server: Server, reference: Reference) -> None:
    prompt, reply = _first_turn(server, reference, 830)
    follow_up = [*prompt, *reply["output_ids"], *reference.user_turn(25, 831)]
    server.generate(follow_up[:-10], 4, sparse_prefill="off")
    with_memory = server.generate(follow_up, 12, explain=True, follow_up="afresh")
    server.flush()
    without = server.generate(follow_up, 12, explain=True, follow_up="afresh")
    assert kept_positions(with_memory) == kept_positions(without)
    assert with_memory["output_ids"] == without["output_ids"]
    assert (report_of(with_memory)["num_cached_tokens"], report_of(without)["num_cached_tokens"]) == (0, 0)
    assert report_of(with_memory)["num_draft_tokens"] < WINDOW + 60 < 1000 < report_of(without)["num_draft_tokens"]
    assert report_of(without)["outcome"] == "pruned"


def _num_overtaken(server: Server, reference: Reference, seed: int) -> int | None:
    """How many long prompts, all asked before a question about a known text, are answered after it; None where fewer
    than seven waited before it."""
    prompt, first = _first_turn(server, reference, seed)
    question = [*prompt, *first["output_ids"], *reference.user_turn(25, seed + 2)]
    documents = [_document(reference, 2000, each) for each in range(seed + 3, seed + 13)]
    ended: list[str] = []

    def ask_long(document: list[int]) -> None:
        server.generate(document, 1, sparse_prefill="on")
        ended.append("long")

    with ThreadPoolExecutor(len(documents)) as pool:
        futures = [pool.submit(ask_long, document) for document in documents]
        while not (waits := server.state()["num_waiting_for_their_score"] >= 7) and len(ended) < len(futures):
            time.sleep(0.01)
        reply = server.generate(question, 1, follow_up="recall")
        ended.append("question")
        for each in futures:
            each.result()
    assert report_of(reply)["num_draft_tokens"] < WINDOW + 60
    return len(documents) - ended.index("question") if waits else None


def test_a_question_does_not_wait_for_a_long_prompts_scoring(server: Server, reference: Reference) -> None:
    """The draft has little to read for it, so it is scored in the round whose prefill batch it goes into."""
    # In the order of arrival it overtakes none; a slow machine's clients may ask late and hear late.
    rounds = (_num_overtaken(server, reference, seed) for seed in (880, 910, 940, 970))
    assert any(overtaken is not None and overtaken >= 3 for overtaken in rounds)
