"""What travels with tokens and is reported. No SGLang here."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from spec_stack.sglang.request import (
    KEY,
    ReportAssembler,
    ReportStore,
    correct_acceptance,
    note_step,
    was_wrong,
    with_report,
)
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


def test_an_openai_stream_carries_the_report_in_its_usage_chunk_alone() -> None:
    report = {"num_proposed": 4, "num_accepted": 2, "gamma_trace": [4], "accepted_trace": [2], "outcome": "pruned"}
    books = ReportStore(None)
    events = [
        'data: {"choices":[{"delta":{"content":"\\"choices\\":[] \\"usage\\":{"}}]}\n\n',
        'data: {"id":"a","choices":[],"usage":{"prompt_tokens":9}}\n\n',
        "data: [DONE]\n\n",
    ]

    async def stream() -> Any:
        for number, event in enumerate(events):
            if number == 1:
                books.close({"id": "a"}, report, is_counted=True)
            yield event

    async def collect() -> list[str]:
        return [event async for event in with_report(stream(), books)]

    first, last, done = asyncio.run(collect())
    assert (first, done) == (events[0], events[2])
    chunk = json.loads(last.removeprefix("data: "))
    assert (chunk["id"], chunk["usage"], chunk["spec_stack"]) == ("a", {"prompt_tokens": 9}, report)


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
