"""System messages and the template's tokens are kept whole on the server, as they are in Python."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Reference, Server


def _messages(reference: Reference, num_system: int, num_user: int, seed: int) -> list[dict[str, str]]:
    system = reference.tokenizer.decode(reference.text_ids(num_system, seed))
    user = reference.tokenizer.decode(reference.text_ids(num_user, seed + 1))
    return [{"role": "system", "content": system}, {"role": "user", "content": f"{user}\nWhat is this about?"}]


def test_a_long_system_message_before_a_short_question_is_kept_whole(server: Server, reference: Reference) -> None:
    messages = _messages(reference, 900, 5, seed=1)
    report = server.chat(messages)["spec_stack"]
    assert (report["sparse_prefill"], report["num_kept_tokens"]) == (False, report["num_prompt_tokens"])
    assert report["num_protected_tokens"] > 880
    assert report["outcome"] == "disabled"
    assert "could be pruned" in report["sparse_prefill_reason"]


@pytest.mark.parametrize("keep_rate", [0.1, 0.4])
def test_a_chat_is_pruned_as_the_library_prunes_it(server: Server, reference: Reference, keep_rate: float) -> None:
    """The server finds in the tokens what the library knows from the messages."""
    messages = [
        *_messages(reference, 150, 500, seed=3),
        {"role": "assistant", "content": "About many things."},
        {"role": "user", "content": "Which of them comes first?"},
    ]
    expected = reference.generator.generate(
        messages=messages, max_tokens=24, sparse_prefill="on", keep_rate=keep_rate, gamma=0, ignore_eos=True
    )
    asked = {"sparse_prefill": "on", "keep_rate": keep_rate, "follow_up": "afresh"}
    reply = server.chat(messages, custom_params={"spec_stack": asked})
    report = reply["spec_stack"]
    assert report["num_kept_tokens"] == expected.metrics.num_kept_tokens < report["num_prompt_tokens"]
    assert reply["text"] == expected.text
    assert report["sparse_prefill_reason"] == 'on: sparse_prefill="on"'


def test_what_a_caller_protects_is_kept_beside_what_the_server_finds(server: Server, reference: Reference) -> None:
    prompt = reference.prompt(700, seed=12)
    span = [300, 340]
    reply = server.generate(prompt, sparse_prefill="on", keep_rate=0.1, protect=[span], explain=True)
    report = reply["meta_info"]["spec_stack"]
    assert any(start <= 300 and stop >= 340 for start, stop in report["kept_spans"])
    assert reply["output_ids"] == reference.tokens_over(prompt, report["kept_spans"], 24)
    without = server.generate(prompt, sparse_prefill="on", keep_rate=0.1, protect=[], explain=True)
    found = without["meta_info"]["spec_stack"]
    assert found["num_kept_tokens"] < report["num_kept_tokens"]
    assert report["num_protected_tokens"] == 40 + found["num_protected_tokens"]


def test_a_plain_text_is_pruned_and_the_reason_says_that_nothing_is_protected(
    server: Server, reference: Reference
) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 4, "custom_params": {"spec_stack": {"sparse_prefill": "on"}}}
    body: dict[str, Any] = {"input_ids": reference.text_ids(600, seed=6), "sampling_params": sampling}
    _, reply = server.post("/generate", body)
    report = reply["meta_info"]["spec_stack"]
    assert report["sparse_prefill"]
    assert report["num_protected_tokens"] == 0
    assert "no chat turn was found" in report["sparse_prefill_reason"]
