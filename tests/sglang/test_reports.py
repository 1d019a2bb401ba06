"""What travels with tokens and is reported. No SGLang here."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from spec_stack.sglang.headers import current_headers
from spec_stack.sglang.http import SpecStackMiddleware, with_report
from spec_stack.sglang.metrics import ReportStore
from spec_stack.sglang.request import KEY, ReportAssembler, correct_acceptance, note_step, was_wrong
from tests.support import controller_data
from tests.support.sglang_requests import REPORT, request_of


def test_what_travels_with_tokens_adds_up_to_the_reply() -> None:
    request = request_of("a")
    for gamma, num_accepted in ((4, 2), (0, 0), (8, 8)):
        note_step(request, controller_data.step(gamma, num_accepted))
        request.output_ids += [0] * (num_accepted + 1)
    carried = request.customized_info[KEY]
    assert len(carried) == len(request.output_ids)
    reply = ReportAssembler()
    assert reply.meta_info(is_finished=False) is None
    # SGLang hands over slices of it, as the tokens go out.
    for start in range(0, len(carried), 3):
        reply.add(carried[start : start + 3])
    unfinished, info = reply.meta_info(is_finished=False), reply.meta_info(is_finished=True)
    assert info is not None
    assert unfinished == {key: value for key, value in info.items() if key not in ("gamma_trace", "accepted_trace")}
    assert (info["num_prompt_tokens"], info["num_kept_tokens"], info["sparse_prefill"]) == (9, 4, True)
    assert (info["gamma_trace"], info["num_proposed"], info["num_accepted"]) == ([4, 0, 8], 12, 10)


def test_of_steps_that_are_anothers_nothing_is_said() -> None:
    report = {name: value for name, value in REPORT.items() if name != "policy"}
    reply = ReportAssembler()
    reply.add([report, None])
    reply.add([])
    said = reply.meta_info(is_finished=True)
    assert said == report
    meta_info = {"spec_accept_rate": 0.5}
    correct_acceptance(meta_info, said)
    assert meta_info == {"spec_accept_rate": 0.5}


def test_a_moving_gammas_acceptance_is_of_what_was_proposed() -> None:
    """SGLang takes the widest gamma for every step's: eight proposed in each of three."""
    report = {"num_proposed": 12, "num_accepted": 9, "gamma_trace": [4, 0, 8], "accepted_trace": [1, 0, 8]}
    meta_info = {"spec_accept_rate": 9 / 24, "spec_num_proposed_drafts": 24, "spec_verify_ct": 3}
    correct_acceptance(meta_info, report)
    assert meta_info["spec_accept_rate"] == 0.75
    assert (meta_info["spec_num_proposed_drafts"], meta_info["spec_num_correct_drafts"]) == (12, 9)
    assert meta_info["spec_accept_length"] == 4
    nothing = {"num_proposed": 0, "num_accepted": 0, "gamma_trace": [], "accepted_trace": []}
    correct_acceptance(meta_info, nothing)
    assert meta_info["spec_accept_rate"] == 0
    assert meta_info["spec_accept_length"] == 1


def test_an_openai_streams_usage_chunk_carries_the_report() -> None:
    report = {"num_proposed": 4, "num_accepted": 2, "gamma_trace": [4], "accepted_trace": [2], "outcome": "pruned"}
    books = ReportStore(None)
    books.close({"id": "a"}, report, is_counted=True)
    event = b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":9}}\n\n'
    chunk = json.loads(with_report(event, books).removeprefix(b"data: "))
    assert (chunk["id"], chunk["usage"], chunk["spec_stack"]) == ("a", {"prompt_tokens": 9}, report)
    for other in (b'data: {"id":"b","choices":[],"usage":{}}\n\n', b"data: [DONE]\n\n", b"\xff"):
        assert with_report(other, books) == other


def _answer(body: bytes, headers: dict[str, str], books: ReportStore) -> tuple[bytes, dict[str, Any] | str]:
    """What the middleware sends of a streamed body, and the options that the application sees."""
    seen: list[Any] = []
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        try:
            seen.append(current_headers().options())
        except ValueError as error:
            seen.append(str(error))
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def receive() -> dict[str, Any]:
        return {}

    async def send(message: Any) -> None:
        sent.append(message["body"])

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(SpecStackMiddleware(application, books)({"type": "http", "headers": raw}, receive, send))
    assert current_headers().options() == {}
    return sent[0], seen[0]


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (None, {}),
        ("1.0", {"sparse_prefill": "off"}),
        ("0.25", {"sparse_prefill": "on", "keep_rate": 0.25}),
        *((bad, "must be over 0 and at most 1") for bad in ("0", "1.5", "nan", "half", "")),
    ],
)
def test_a_header_asks_for_a_keep_rate_on_any_endpoint(given: str | None, seen: dict[str, Any] | str) -> None:
    headers = {} if given is None else {"x-spec-stack-keep-rate": given}
    body, options = _answer(b"x", headers, ReportStore(None))
    assert (body, options == seen or seen in options) == (b"x", True)


def test_a_choice_that_quotes_a_usage_chunk_is_left_alone() -> None:
    quoted = b'data: {"id":"a","choices":[{"delta":{"content":"\\"choices\\":[] \\"usage\\":{"}}]}\n\n'
    books = ReportStore(None)
    books.close({"id": "a"}, {"outcome": "pruned"}, is_counted=False)
    assert _answer(quoted, {}, books)[0] == quoted


def test_a_step_after_a_retraction_is_noted_at_its_own_token() -> None:
    request = request_of("a")
    note_step(request, controller_data.step(4, 3))
    request.output_ids = [1, 1]
    note_step(request, controller_data.step(2, 0))
    assert request.customized_info[KEY][1:] == [[4, 3], [2, 0]]
    request.output_ids = [1, 1, 1, 1, 1]
    note_step(request, controller_data.step(1, 1))
    assert request.customized_info[KEY][5] == [1, 1]


def test_a_request_was_wrong_where_most_of_its_newest_known_proposal_was() -> None:
    request = request_of("a")
    assert not was_wrong(request)
    for gamma, num_accepted, expected in ((4, 1, True), (4, 2, False), (1, 0, True), (0, 0, False), (1, 1, False)):
        note_step(request, controller_data.step(gamma, num_accepted))
        request.output_ids += [0] * (num_accepted + 1)
        assert was_wrong(request) is expected
