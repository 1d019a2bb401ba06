"""The radix cache is asked before a prompt is scored, and what is cached is shared wherever it is the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from spec_stack.prefill.queries import WINDOW
from tests.support.nightly import others_nightly

from .conftest import MIN_PROMPT_TOKENS, Reference, Server, generate_body


def test_a_follow_up_of_a_dense_turn_is_never_pruned(server: Server, reference: Reference) -> None:
    history = reference.prompt(1000, seed=71)
    first = server.generate(history, sparse_prefill="off")
    for turn in range(3):
        history = [*history, *first["output_ids"], *reference.user_turn(60, seed=72 + turn)]
        reply = server.generate(history)
        report = reply["meta_info"]["spec_stack"]
        num_cached = reply["meta_info"]["cached_tokens"]
        assert num_cached >= len(history) - 90
        assert report["outcome"] == "cached"
        assert report["sparse_prefill_reason"] == f"off: {num_cached} of {len(history)} tokens are cached"
        assert report["num_scored_tokens"] == 0
        assert reply["output_ids"] == reference.tokens(history)
        first = reply


def test_much_new_text_after_a_dense_turn_is_scored_over_what_is_cached(server: Server, reference: Reference) -> None:
    history = reference.prompt(700, seed=81)
    server.generate(history, sparse_prefill="off")
    longer = [*history, *reference.user_turn(MIN_PROMPT_TOKENS + 200, seed=82)]
    reply = server.generate(longer, explain=True)
    report = reply["meta_info"]["spec_stack"]
    assert report["outcome"] == "pruned"
    first = report["kept_spans"][0]
    num_cached = reply["meta_info"]["cached_tokens"]
    # The last slot that two prompts share is not given to the second: its draft token may be the first one's.
    assert first[0] == 0
    assert len(history) - 1 <= num_cached <= first[1]
    assert report["num_scored_tokens"] == len(longer) - num_cached
    assert f"{num_cached} of {len(longer)} tokens are cached and kept" in report["sparse_prefill_reason"]
    assert report["num_kept_tokens"] < len(longer) - 100
    assert reply["output_ids"] == reference.tokens_over(longer, report["kept_spans"], 24)


def test_dense_and_pruned_prompts_share_the_beginning_they_truly_share(server: Server, reference: Reference) -> None:
    """Kept from the first token on, a beginning has the same positions either way."""
    system = reference.text_ids(200, seed=95)
    server.generate([*system, *reference.text_ids(50, seed=96)], 2, sparse_prefill="off")
    prompt = [*system, *reference.text_ids(700, seed=97)]
    reply = server.generate(prompt, sparse_prefill="on", protect=[[0, len(system)]], explain=True)
    assert reply["meta_info"]["cached_tokens"] >= len(system)
    spans = reply["meta_info"]["spec_stack"]["kept_spans"]
    assert reply["output_ids"] == reference.tokens_over(prompt, spans, 24)


def test_nothing_crosses_the_wall_of_a_tenant(server: Server, reference: Reference) -> None:
    """Not cached tokens, and not the memory of a selection."""
    prompt = reference.prompt(900, seed=98)
    for wall in ({"extra_key": "tenant a"}, {"extra_key": "tenant b"}, {"cache_salt": "c"}):
        body = {**generate_body(prompt, 8, sparse_prefill="on"), **wall}
        _, first = server.post("/generate", body)
        _, second = server.post("/generate", body)
        assert first["meta_info"]["cached_tokens"] == 0, wall
        assert first["meta_info"]["spec_stack"]["num_scored_tokens"] == len(prompt)
        assert second["meta_info"]["spec_stack"]["num_scored_tokens"] == 0
        assert second["meta_info"]["cached_tokens"] > 100
        assert first["output_ids"] == second["output_ids"] == reference.tokens(prompt, sparse_prefill="on")[:8]


def _ask(server: Server, prompt: Sequence[int], num_new: int = 4, **custom: Any) -> dict[str, Any]:
    """Without a salt, as clients that know of none."""
    body = generate_body(prompt, num_new, explain=True, **custom)
    body.pop("extra_key")
    status, reply = server.post("/generate", body)
    assert status == 200, reply
    return dict(reply)


def _kept(reply: dict[str, Any]) -> list[list[int]]:
    return list(reply["meta_info"]["spec_stack"]["kept_spans"])


@pytest.mark.parametrize("seed", others_nightly([1, 2, 3], usual=[1]))
def test_a_neighbours_question_about_the_same_document_changes_nothing_of_what_is_kept(
    server: Server, reference: Reference, seed: int
) -> None:
    document = reference.text_ids(1200, seed=2000 + seed)
    questions = [reference.text_ids(40, seed=2100 + 2 * seed + at) for at in range(2)]
    server.flush()
    alone = _ask(server, [*document, *questions[1]])
    server.flush()
    neighbour = _ask(server, [*document, *questions[0]])
    after_neighbour = _ask(server, [*document, *questions[1]])
    assert _kept(after_neighbour) == _kept(alone) != _kept(neighbour)
    assert after_neighbour["output_ids"] == alone["output_ids"]
    # The draft reads the document once all the same.
    report = after_neighbour["meta_info"]["spec_stack"]
    assert (report["num_cached_tokens"], report["num_draft_tokens"] < WINDOW + 100) == (0, True)


def test_what_was_kept_of_earlier_turns_is_shown_under_a_salt_alone(server: Server, reference: Reference) -> None:
    prompt = reference.prompt(900, seed=2200)
    first = _ask(server, prompt, 8, sparse_prefill="on", follow_up="freeze")
    longer = [*prompt, *first["output_ids"], *reference.text_ids(30, seed=2201)]
    reply = _ask(server, longer, follow_up="freeze")
    num_cached = reply["meta_info"]["spec_stack"]["num_cached_tokens"]
    assert num_cached == len(prompt) + 7
    assert _kept(reply) == [[num_cached, len(longer)]]
    assert _kept(first)[0][0] == 0
