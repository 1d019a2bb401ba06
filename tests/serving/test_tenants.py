"""What a first turn keeps is its own: no neighbour's question shapes it, and none shows in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from spec_stack.prefill.queries import WINDOW
from tests.support.nightly import others_nightly

from .conftest import Reference, Server, generate_body


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
    beside = _ask(server, [*document, *questions[1]])
    assert _kept(beside) == _kept(alone) != _kept(neighbour)
    assert beside["output_ids"] == alone["output_ids"]
    # The draft reads the document once all the same.
    report = beside["meta_info"]["spec_stack"]
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
