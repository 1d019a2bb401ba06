"""One server, chunked prefill, radix cache, eight rows: its tokens are those of the Transformers backend."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from spec_stack import PrefillConfig
from spec_stack.controller.tuning import TUNING
from tests.support.nightly import others_nightly

from .conftest import CONTEXT, Reference, Server, generate_body, special_spans


def test_a_dense_prompt_gives_the_references_tokens(server: Server, reference: Reference) -> None:
    prompt = reference.prompt(300, seed=0)
    reply = server.generate(prompt, 48)
    assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=48)
    report = reply["meta_info"]["spec_stack"]
    assert (report["num_kept_tokens"], report["num_scored_tokens"], report["sparse_prefill"]) == (len(prompt), 0, False)


@pytest.mark.parametrize("keep_rate", [0.1, 0.3])
@pytest.mark.parametrize("num_tokens", [200, 900, 1400])
def test_a_pruned_prompt_gives_the_references_tokens(
    server: Server, reference: Reference, num_tokens: int, keep_rate: float
) -> None:
    prompt = reference.prompt(num_tokens, seed=num_tokens)
    reply = server.generate(prompt, sparse_prefill="on", keep_rate=keep_rate)
    expected = reference.result(prompt, sparse_prefill="on", keep_rate=keep_rate)
    report = reply["meta_info"]["spec_stack"]
    assert report["num_kept_tokens"] == expected.metrics.num_kept_tokens < len(prompt)
    assert report["num_scored_tokens"] == reply["meta_info"]["prompt_tokens"] == len(prompt)
    assert reply["output_ids"] == list(expected.token_ids)


def test_a_prompt_over_the_threshold_is_pruned_and_finds_its_fact(server: Server, reference: Reference) -> None:
    from spec_stack.bench.demo import hide_fact

    fact = hide_fact(reference.tokenizer, 3100, 5)
    body = {"model": "default", "messages": fact.messages, "max_tokens": 32, "temperature": 0, "return_meta_info": True}
    for switch in (None, "off"):
        extra = {} if switch is None else {"custom_params": {"spec_stack": {"sparse_prefill": switch}}}
        status, reply = server.post("/v1/chat/completions", {**body, **extra})
        assert status == 200, reply
        report = reply["choices"][0]["meta_info"]["spec_stack"]
        assert reply["usage"]["prompt_tokens"] == report["num_prompt_tokens"] > 3100
        assert report["sparse_prefill"] is (switch is None)
        assert fact.is_answered_by(reply["choices"][0]["message"]["content"])


_QUESTION, _FACT = "What is the code word of the gate?", "The code word of the gate is heliotrope."


@pytest.mark.parametrize(
    "messages",
    [
        [("system", _QUESTION), ("user", "{document}")],
        [
            ("user", f"{{document}}\n\n{_QUESTION}"),
            ("assistant", "heliotrope"),
            ("user", "{document}\nNow its lock."),
        ],
        [("user", f"<tool_response>\n{{document}}\n</tool_response>\n{_QUESTION}")],
    ],
    ids=["system", "earlier turn", "tool output"],
)
def test_a_chat_is_pruned_as_the_library_prunes_it(
    server: Server, reference: Reference, messages: list[tuple[str, str]]
) -> None:
    """The server finds in the tokens what the library knows from the messages (others: `tests/entry_points`)."""
    lines = reference.tokenizer.decode(reference.text_ids(500, seed=211)).splitlines()
    document = "\n".join([*lines[: len(lines) // 3], _FACT, *lines[len(lines) // 3 :]])
    chat = [{"role": role, "content": content.replace("{document}", document)} for role, content in messages]
    options = {"sparse_prefill": "on", "keep_rate": 0.2}
    expected = reference.generator.generate(messages=chat, max_tokens=16, gamma=0, ignore_eos=True, **options)
    reply = server.chat(chat, max_tokens=16, custom_params={"spec_stack": {**options, "follow_up": "afresh"}})
    report = reply["spec_stack"]
    assert report["num_kept_tokens"] == expected.metrics.num_kept_tokens < report["num_prompt_tokens"]
    assert reply["text"] == expected.text


def test_a_streamed_reply_is_the_whole_one_and_reports_all_along(server: Server, reference: Reference) -> None:
    prompt = reference.prompt(700, seed=7)
    whole = server.generate(prompt, sparse_prefill="on")
    chunks = list(server.stream("/generate", generate_body(prompt, 24, sparse_prefill="on")))
    assert len(chunks) > 2
    assert chunks[-1]["text"] == whole["text"]
    for chunk in chunks:
        assert chunk["meta_info"]["prompt_tokens"] == len(prompt)
        assert (
            chunk["meta_info"]["spec_stack"]["num_kept_tokens"] == whole["meta_info"]["spec_stack"]["num_kept_tokens"]
        )


def test_a_repeated_pruned_prompt_reuses_its_prefix_and_gives_the_same_tokens(
    server: Server, reference: Reference
) -> None:
    prompt = reference.prompt(800, seed=21)
    first, second = (server.generate(prompt, sparse_prefill="on") for _ in range(2))
    kept = first["meta_info"]["spec_stack"]["num_kept_tokens"]
    # Other prompts begin alike.
    assert first["meta_info"]["cached_tokens"] < 64
    assert second["meta_info"]["cached_tokens"] >= kept - 1
    assert first["output_ids"] == second["output_ids"] == reference.tokens(prompt, sparse_prefill="on")


def test_a_prompt_of_the_kept_tokens_finds_their_kv(server: Server, reference: Reference) -> None:
    prompt = reference.prompt(800, seed=22)
    server.generate(prompt, sparse_prefill="on")
    kept = kept_ids(reference, prompt)
    reply = server.generate(kept)
    assert reply["meta_info"]["cached_tokens"] >= len(kept) - 1
    assert reply["output_ids"] == reference.tokens(kept)


def kept_ids(reference: Reference, prompt: list[int], config: PrefillConfig | None = None) -> list[int]:
    """The tokens of a prompt that survive pruning, by the paper's rule or by what is given."""
    from spec_stack.hf.model import CachedModel
    from tests.support.scoring import score_prompt

    config = config or reference.generator.config.prefill
    draft = CachedModel(reference.generator.draft, config.prefill_chunk)
    pieces = reference.generator.pair.pieces(prompt)
    protected = [(start, stop) for start, stop in special_spans(prompt)]
    return list(score_prompt(draft, prompt, config, protected, pieces)[0].token_ids)


@pytest.mark.parametrize(
    ("policy", "num_requests"),
    others_nightly(product(("throughput", "ema"), (1, 4, 8)), usual=[("throughput", 8), ("ema", 8)]),
)
def test_policies_change_gamma_and_no_token(
    server: Server, reference: Reference, policy: str, num_requests: int
) -> None:
    """`throughput` tries another gamma than the best once in so many steps, whatever they take on this machine."""
    gammas, num_steps, seed = set[int](), 0, 50
    while len(gammas) < 2 and num_steps <= 2 * TUNING.check_every:
        prompts = [reference.prompt(100 + 30 * index, seed=seed + index) for index in range(num_requests)]
        replies = server.generate_all([(prompt, {"max_new_tokens": 48, "policy": policy}) for prompt in prompts])
        for prompt, reply in zip(prompts, replies, strict=True):
            assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=48)
        traces = [reply["meta_info"]["spec_stack"]["gamma_trace"] for reply in replies]
        gammas.update(*traces)
        num_steps += max(map(len, traces))
        seed += num_requests
    assert len(gammas) > 1


def test_a_request_that_caps_its_gamma_slows_nobody_and_keeps_its_cap(server: Server, reference: Reference) -> None:
    prompts = [reference.prompt(120 + 40 * index, seed=90 + index) for index in range(4)]
    gammas = (0, 1, 2, 8)
    options = [{"max_new_tokens": 60, "gamma": gamma} for gamma in gammas]
    replies = server.generate_all(list(zip(prompts, options, strict=True)))
    for prompt, gamma, reply in zip(prompts, gammas, replies, strict=True):
        assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=60)
        info = reply["meta_info"]["spec_stack"]
        assert set(info["gamma_trace"]) == {gamma}
        assert max(info["accepted_trace"]) <= gamma
    assert max(replies[-1]["meta_info"]["spec_stack"]["accepted_trace"]) > 2


@pytest.mark.parametrize("others", others_nightly([{}, {"gamma": 4}], usual=[{"gamma": 4}]), ids=["free", "longer"])
def test_a_capped_request_beside_others_changes_no_token(
    server: Server, reference: Reference, others: dict[str, Any]
) -> None:
    prompts = [reference.prompt(100 + 40 * index, seed=50 + index) for index in range(4)]
    options: list[dict[str, Any]] = [
        {"max_new_tokens": 80, **own} for own in ({"gamma": 0}, {"gamma": 1}, others, others)
    ]
    replies = server.generate_all(list(zip(prompts, options, strict=True)))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=80)
    traces = [reply["meta_info"]["spec_stack"]["gamma_trace"] for reply in replies]
    assert (set(traces[0]), set(traces[1]) <= {0, 1}) == ({0}, True)
    # What free ones draft is for the policy to choose by what steps cost; those who ask for more are not held back.
    assert others == {} or max(traces[2]) == 4


@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_a_request_alone_gets_the_gamma_it_asks_for(server: Server, reference: Reference, gamma: int) -> None:
    prompt = reference.prompt(120, seed=5)
    reply = server.generate(prompt, 30, gamma=gamma)
    info = reply["meta_info"]["spec_stack"]
    assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=30)
    assert set(info["gamma_trace"]) == {gamma}
    assert 30 - gamma <= 1 + len(info["gamma_trace"]) + info["num_accepted"] <= 30 + gamma
    assert info["policy"] == "fixed"


@pytest.mark.parametrize(
    ("custom", "named"),
    [
        ({"keep_rate": 1.5}, "keep_rate"),
        ({"gamma": 4, "policy": "ema"}, "gamma"),
        ({"policy": 7}, "policy"),
    ],
)
def test_a_bad_option_is_a_400_that_names_it(server: Server, custom: dict[str, Any], named: str) -> None:
    status, reply = server.post("/generate", generate_body([5, 6, 7], 4, **custom))
    assert status == 400
    assert named in reply["error"]["message"]
    chat = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    status, reply = server.post("/v1/chat/completions", {**chat, "custom_params": {"spec_stack": custom}})
    assert status == 400
    assert named in str(reply)


def test_a_pruned_prompt_may_be_answered_in_a_grammar_several_times(server: Server, reference: Reference) -> None:
    body = generate_body(reference.prompt(500, seed=13), 20, sparse_prefill="on")
    body["sampling_params"] |= {"regex": "(yes|no)[0-9]{3}", "n": 2, "ignore_eos": False}
    status, replies = server.post("/generate", body)
    assert status == 200, replies
    assert len(replies) == 2
    for reply in replies:
        assert reply["meta_info"]["spec_stack"]["sparse_prefill"]
        assert re.fullmatch("(yes|no)[0-9]{3}", reply["text"])
    assert replies[0]["text"] == replies[1]["text"]


def test_input_logprobs_are_served_densely_with_the_reason(server: Server, reference: Reference) -> None:
    prompt = reference.prompt(400, seed=9)
    body = {**generate_body(prompt, 4, sparse_prefill="on"), "return_logprob": True, "logprob_start_len": 0}
    status, reply = server.post("/generate", body)
    assert status == 200
    report = reply["meta_info"]["spec_stack"]
    assert not report["sparse_prefill"]
    assert "logprobs" in report["sparse_prefill_reason"]
    assert len(reply["meta_info"]["input_token_logprobs"]) == len(prompt)


def test_an_unbounded_request_ends_where_its_true_length_fills_the_context(
    server: Server, reference: Reference
) -> None:
    """Counted by the kept tokens it would run past the rotary positions, with no error."""
    prompt = reference.prompt(CONTEXT - 80, seed=11)[-(CONTEXT - 40) :]
    body = generate_body(prompt, 0, sparse_prefill="on", keep_rate=0.1)
    body["sampling_params"]["max_new_tokens"] = None
    status, reply = server.post("/generate", body)
    assert status == 200, reply
    assert reply["meta_info"]["spec_stack"]["num_kept_tokens"] < 0.2 * len(prompt)
    assert 30 < reply["meta_info"]["completion_tokens"] <= CONTEXT - len(prompt)
