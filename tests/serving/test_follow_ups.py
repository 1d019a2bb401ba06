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
    generate_body,
)

Spans = list[list[int]]


def _positions(reply: dict[str, Any]) -> list[int]:
    return [position for start, stop in _report(reply)["kept_spans"] for position in range(start, stop)]


def _report(reply: dict[str, Any]) -> dict[str, Any]:
    return dict(reply["meta_info"]["spec_stack"])


def _dropped(reply: dict[str, Any]) -> set[int]:
    return set(range(_report(reply)["num_prompt_tokens"])) - set(_positions(reply))


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
    asked = _document(reference, 1300, 800)
    with reference.generator.session(SessionConfig(recall=False)) as session:
        for turn in range(4):
            options = {"sparse_prefill": "on"} if turn in (0, 3) else {}
            expected = session.generate(input_ids=asked, max_tokens=12, gamma=0, ignore_eos=True, **options)
            reply = server.generate(asked, 12, explain=True, follow_up="freeze", **options)
            report = _report(reply)
            assert report["num_cached_tokens"] == expected.metrics.num_cached_tokens, turn
            assert reply["output_ids"] == list(expected.token_ids), turn
            going_on = [*asked, *reply["output_ids"]]
            asked = [*going_on, *texts[min(turn, 2)]]


@pytest.fixture(scope="module")
def eager_draft() -> Any:
    return AutoModelForCausalLM.from_pretrained(ASSETS / "draft", attn_implementation="eager", dtype=torch.float32)


@pytest.fixture(scope="module")
def by_chunks(launch: Launcher) -> Server:
    """A server that restores chunks by the votes of all layers, as the oracle does."""
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
    start = _report(reply)["num_cached_tokens"]
    assert start == len(longer) - num_new - 1
    given = [*_positions(first), *range(len(prompt), start)]
    pieces = Pieces(reference.tokenizer).of(longer)
    text = PromptReader(reference.tokenizer).read(longer)
    roles = [turn.role for turn in text.turns]
    assert roles == ["user", "assistant", "user"]
    found = question = reference_question.question_of(pieces, line_borders(pieces), text.template, roles)
    if set(range(start, len(longer))) <= set(_positions(reply)):
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
    asked = question.since(start).words()
    expected = dropped_chunks_to_restore(
        wanted.tolist(),
        given,
        start,
        PrefillConfig.chunk_size,
        settings["recall_threshold"],
        settings["max_recalled_chunks"],
        reference_question.shared(pieces, chunks, [-1] * len(chunks), asked, short_word=0.5, power=0.5, most_units=6),
        settings["recall_word_threshold"],
    )
    assert _positions(reply)[: len(given) + len(expected)] == sorted([*given, *expected])
    assert len(expected) == _report(reply)["num_recalled_tokens"] > 0
    assert reply["output_ids"] == reference.tokens_over(longer, _report(reply)["kept_spans"], 8)


@pytest.mark.parametrize("rule", ["freeze", "recall"])
def test_what_was_given_stays_and_is_in_the_cache_with_the_reply(
    server: Server, reference: Reference, rule: str
) -> None:
    prompt, reply = _first_turn(server, reference, {"freeze": 810, "recall": 815}[rule], follow_up=rule)
    for turn in range(3):
        end, kept, dropped = len(prompt), _positions(reply), _dropped(reply)
        prompt = [*prompt, *reply["output_ids"], *reference.user_turn(25, 811 + turn)]
        reply = server.generate(prompt, 12, explain=True, follow_up=rule)
        report = _report(reply)
        positions, start = _positions(reply), report["num_cached_tokens"]
        # Of the reply's last token there is no KV, unless SGLang drew another behind it that the turn begins with.
        assert start in (len(prompt) - 26, len(prompt) - 25)
        given = [*kept, *range(end, start)]
        recalled = set(positions) & dropped
        assert len(recalled) == report["num_recalled_tokens"]
        old = sorted([*given, *recalled])
        assert positions == [*old, *range(start, len(prompt))]
        num_unchanged = next(
            (at for at, pair in enumerate(zip(old, given, strict=False)) if pair[0] != pair[1]), len(given)
        )
        assert reply["meta_info"]["cached_tokens"] >= num_unchanged
        assert rule == "recall" or not recalled
        # Nothing is scored to freeze, and to recall the draft reads what is new and the scoring queries.
        assert report["num_draft_tokens"] <= (0 if rule == "freeze" else 26 + WINDOW)
        assert reply["output_ids"] == reference.tokens_over(prompt, report["kept_spans"], 12)


def test_long_new_text_is_pruned_over_what_was_given(server: Server, reference: Reference) -> None:
    for seed, rule in ((820, "freeze"), (822, "recall")):
        prompt, reply = _first_turn(server, reference, seed, follow_up=rule)
        longer = [*prompt, *reply["output_ids"], *reference.user_turn(MIN_PROMPT_TOKENS + 300, 821)]
        second = server.generate(longer, 12, explain=True, follow_up=rule)
        report = _report(second)
        num_old = report["num_cached_tokens"]
        given = [*_positions(reply), *range(len(prompt), num_old)]
        recalled = set(_positions(second)) & (set(range(num_old)) - set(given))
        old = sorted([*given, *recalled])
        assert _positions(second)[: len(old)] == old
        num_new = len(longer) - num_old
        kept_new = [position for position in _positions(second) if position >= num_old]
        assert 0.15 * num_new < len(kept_new) < 0.5 * num_new
        assert report["num_draft_tokens"] <= num_new + 12
        assert second["output_ids"] == reference.tokens_over(longer, report["kept_spans"], 12)


def test_afresh_a_reply_does_not_depend_on_what_the_server_remembers(server: Server, reference: Reference) -> None:
    prompt, reply = _first_turn(server, reference, 830)
    follow_up = [*prompt, *reply["output_ids"], *reference.user_turn(25, 831)]
    server.generate(follow_up[:-10], 4, sparse_prefill="off")
    with_memory = server.generate(follow_up, 12, explain=True, follow_up="afresh")
    server.flush()
    without = server.generate(follow_up, 12, explain=True, follow_up="afresh")
    assert _positions(with_memory) == _positions(without)
    assert with_memory["output_ids"] == without["output_ids"]
    assert (_report(with_memory)["num_cached_tokens"], _report(without)["num_cached_tokens"]) == (0, 0)
    assert _report(with_memory)["num_draft_tokens"] < WINDOW + 60 < 1000 < _report(without)["num_draft_tokens"]
    assert _report(without)["outcome"] == "pruned"


def test_edits_and_branches_go_on_from_the_last_turn_whose_question_they_hold(
    server: Server, reference: Reference
) -> None:
    """What a question had kept is taken over by who goes on from it, and by nobody else."""
    prompt, first = _first_turn(server, reference, 840, follow_up="freeze")
    second = [*prompt, *first["output_ids"], *reference.user_turn(25, 841)]
    server.generate(second, 12, follow_up="freeze")
    end = len(prompt) + len(first["output_ids"]) - 1
    for changed, num_cached in (
        ([*second[:-10], *reference.user_turn(20, 842)], end),
        (second[:-1], end),
        ([*prompt[:-20], *reference.user_turn(20, 843)], 0),
    ):
        reply = server.generate(changed, 12, explain=True, follow_up="freeze")
        report = _report(reply)
        assert report["num_cached_tokens"] == num_cached
        assert reply["output_ids"] == reference.tokens_over(changed, report["kept_spans"], 12)
        if num_cached:
            assert _positions(reply)[: len(_positions(first))] == _positions(first)
    # The very same prompt is given to the target as it was, as for n replies at once.
    again = server.generate(prompt, 12, explain=True, follow_up="freeze", sparse_prefill="on")
    assert _positions(again) == _positions(first)
    assert again["output_ids"] == first["output_ids"]


def test_a_follow_up_of_another_tenant_is_a_new_prompt(server: Server, reference: Reference) -> None:
    prompt = _document(reference, 1100, 850)
    first = server.post("/generate", {**generate_body(prompt, 8, explain=True), "extra_key": "a"})[1]
    follow_up = [*prompt, *first["output_ids"], *reference.user_turn(25, 851)]
    for tenant, num_cached in (("b", 0), ("a", len(follow_up) - 26)):
        _, reply = server.post("/generate", {**generate_body(follow_up, 8, explain=True), "extra_key": tenant})
        report = _report(reply)
        assert report["num_cached_tokens"] == num_cached
        assert (report["num_draft_tokens"] > len(prompt)) == (tenant == "b")
        assert reply["output_ids"] == reference.tokens_over(follow_up, report["kept_spans"], 8)


def test_a_short_beginning_that_was_pruned_changes_no_selection(server: Server, reference: Reference) -> None:
    prompt, _ = _first_turn(server, reference, 860)
    other = [*prompt[:300], *reference.user_turn(1100, 861)]
    reply = server.generate(other, 4, follow_up="recall")
    assert _report(reply)["num_cached_tokens"] == 0
    # The draft has read that beginning, which changes nothing but what it costs.
    assert _report(reply)["num_draft_tokens"] == len(other) - 300


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
        asked = [pool.submit(ask_long, document) for document in documents]
        while not (waits := server.state()["num_waiting_for_their_score"] >= 7) and len(ended) < len(asked):
            time.sleep(0.01)
        reply = server.generate(question, 1, follow_up="recall")
        ended.append("question")
        for each in asked:
            each.result()
    assert _report(reply)["num_draft_tokens"] < WINDOW + 60
    return len(documents) - ended.index("question") if waits else None


def test_a_question_does_not_wait_for_a_long_prompts_scoring(server: Server, reference: Reference) -> None:
    """The draft has little to read for it, so it is scored in the round whose prefill batch it goes into."""
    # In the order of arrival it overtakes none; a slow machine's clients may ask late and hear late.
    rounds = (_num_overtaken(server, reference, seed) for seed in (880, 910, 940, 970))
    assert any(overtaken is not None and overtaken >= 3 for overtaken in rounds)
