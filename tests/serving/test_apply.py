"""What an applied plan leaves for its neighbours: only what no question has chosen. No server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.prefill.alignment import Span
from spec_stack.sglang.decide import Applier, Plan, Prompt
from spec_stack.sglang.prefix_reuse import PrefillPlan, TurnStore, plan_prefill
from spec_stack.sglang.request_state import RequestOptions
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.tokenizers.chat_turns import Protected

CONFIG = PrefillConfig()
TENANT = None, None
DOCUMENT = list(range(10_000, 12_000))


@dataclass
class Request:
    origin_input_ids: Sequence[int]
    output_ids: list[int] = field(default_factory=lambda: [9] * 5)
    finished_len: int | None = None
    extra_key: str | None = None
    logprob_start_len: int = -1
    customized_info: dict[str, list[Any]] | None = None

    def finished(self) -> bool:
        return True


class Server:
    def __init__(self) -> None:
        self.turns = TurnStore(1_000_000)
        self.applier = Applier(ServerConfig(), self.turns)

    def give(
        self,
        prompt_ids: Sequence[int],
        given: PrefillPlan,
        protected: tuple[Span, ...] = (),
        options: RequestOptions | None = None,
    ) -> None:
        prompt = Prompt(tuple(prompt_ids), None, None, CONFIG, "recall", Protected(protected))
        request: Any = Request(prompt_ids)
        self.applier.apply(request, options or RequestOptions(), Plan(prompt, given, "on", "pruned"))
        self.turns.take_in_replies()

    def ask_about_the_document(self, protected: tuple[Span, ...] = ()) -> list[int]:
        """A first turn that keeps all of the document but its end; its prompt."""
        prompt_ids = [*DOCUMENT, *[1] * 20]
        self.give(prompt_ids, _part(prompt_ids, (*range(1900), *range(2000, 2020))), protected)
        return prompt_ids

    def num_unchosen(self, num_cached: int) -> int:
        """Of the document, for who asks something else about it."""
        return self.turns.num_unchosen(TENANT, [*DOCUMENT, *[3] * 30], num_cached)


def _part(prompt_ids: Sequence[int], positions: tuple[int, ...]) -> PrefillPlan:
    return PrefillPlan(tuple(prompt_ids[at] for at in positions), positions, len(prompt_ids))


@pytest.mark.parametrize("num_protected", [0, 1, 500])
def test_a_first_turns_protected_beginning_counts_for_its_neighbours(num_protected: int) -> None:
    server, prompt_ids = Server(), list(range(3000))
    given = _part(prompt_ids, (*range(500), *range(1000, 1100), *range(2980, 3000)))
    server.give(prompt_ids, given, ((0, num_protected),) if num_protected else ())
    other = [*prompt_ids[:500], *[7] * 300]
    assert server.turns.num_unchosen(TENANT, other, 500) == num_protected


def test_what_a_request_protects_itself_counts_for_nobody_else() -> None:
    server, prompt_ids = Server(), list(range(3000))
    given = _part(prompt_ids, (*range(500), *range(2980, 3000)))
    server.give(prompt_ids, given, ((0, 500),), RequestOptions(protect=((0, 500),)))
    assert server.turns.num_unchosen(TENANT, [*prompt_ids[:500], *[7] * 300], 500) == 0


@pytest.mark.parametrize("num_new", [40, 3000])
@pytest.mark.parametrize("num_protected", [0, 100])
def test_what_a_later_question_brought_back_counts_for_no_neighbour(num_new: int, num_protected: int) -> None:
    """Whether its new text was pruned, or all of its prompt was given; and however many turns come after."""
    server = Server()
    protected = ((0, num_protected),) if num_protected else ()
    text = server.ask_about_the_document(protected)
    assert server.num_unchosen(1900) == num_protected
    for turn in range(2):
        text = [*text, *[9] * 4, *[2 + turn] * num_new]
        beginning = server.turns.find(TENANT, text)
        assert beginning.num_tokens
        importance, prunes = torch.rand(len(text)), num_new > 1000
        importance[1900:2000] = 100
        given = plan_prefill(text, beginning, importance, prunes, SessionConfig(), CONFIG, protected)
        if not turn:
            assert given.num_recalled == 100
            assert given.inherits_all
            assert given.is_whole is not prunes
        server.give(text, given, protected)
        assert server.num_unchosen(2000) == num_protected
        assert server.num_unchosen(1900) == num_protected


def test_what_is_cached_of_a_dense_turn_counts_for_its_neighbours() -> None:
    """Where nothing was dropped and nothing came back, no question has chosen."""
    server = Server()
    text = [*DOCUMENT, *[4] * 3000]
    positions = (*range(2000), *range(2500, 2600), len(text) - 1)
    given = PrefillPlan(tuple(text[at] for at in positions), positions, len(text), num_cached=2000)
    server.give(text, given)
    assert server.num_unchosen(2000) == 2000
