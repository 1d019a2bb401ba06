"""A scoring model with SGLang's own algorithms, or none: the target's tokens, whoever drafts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from spec_stack import PrefillConfig

from .conftest import ASSETS, CONTEXT, MIN_PROMPT_TOKENS, Reference, Server, generate_body, kept_positions
from .test_serving import kept_ids
from .test_traffic import NUM_REQUESTS, Traffic

_NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-ngram-capacity", "200000")
_STANDALONE = (
    *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(ASSETS / "draft")),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
_SIZES = (
    *("--max-total-tokens", "16000", "--max-running-requests", "6", "--context-length", str(CONTEXT)),
    *("--spec-stack-min-prompt-tokens", str(MIN_PROMPT_TOKENS), "--enable-metrics"),
)
# SGLang compiles NGRAM's trie at its first launch.
_HAS_NGRAM = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
_RETRACTIONS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "6"}
_TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.mark.parametrize(
    ("algorithm", "arguments", "environment"),
    [
        pytest.param(_NGRAM, ("--chunked-prefill-size", "256"), {}, id="ngram", marks=_HAS_NGRAM),
        # Chunks of prompts ride with decoding requests, and steps begin before the last one's result.
        pytest.param(
            (),
            ("--chunked-prefill-size", "256", "--enable-mixed-chunk"),
            {},
            id="none",
            marks=pytest.mark.nightly,
        ),
        pytest.param(_NGRAM, (), _RETRACTIONS, id="ngram-retracted", marks=[pytest.mark.nightly, _HAS_NGRAM]),
        pytest.param((), ("--disable-overlap-schedule",), _RETRACTIONS, id="none-retracted", marks=pytest.mark.nightly),
        pytest.param(_STANDALONE, (), {}, id="standalone", marks=pytest.mark.nightly),
        pytest.param((), ("--tp-size", "2"), _TWO_RANKS, id="none-two-ranks", marks=pytest.mark.nightly),
    ],
)
def test_prompts_are_pruned_whoever_drafts(
    launch: Any, reference: Reference, algorithm: Sequence[str], arguments: Sequence[str], environment: dict[str, str]
) -> None:
    _check(launch(*_SIZES, *arguments, own_algorithm=algorithm, environment=environment), reference, environment)


# Trained for the embedded target; the trainer is in the history (experiments/README.md).
HEAD = Path(__file__).parent / "eagle3_head"


@pytest.mark.parametrize(
    "environment",
    [pytest.param({}, id="eagle3"), pytest.param(_RETRACTIONS, id="retracted", marks=pytest.mark.nightly)],
)
def test_prompts_are_pruned_with_a_head_of_the_target(
    launch: Any, reference: Reference, environment: dict[str, str]
) -> None:
    """EAGLE-3 with a trained head: accepted length 1.197 when trained for two CPU minutes."""
    head = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(HEAD))
    steps = ("--speculative-num-steps", "2", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3")
    server = launch(*_SIZES, own_algorithm=(*head, *steps), environment=environment)
    lengths = []
    for seed in range(3):
        prompt = reference.prompt(700, seed=800 + seed)
        reply = server.generate(prompt, 32, sparse_prefill="on")
        assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=32, sparse_prefill="on")
        lengths.append(reply["meta_info"]["spec_accept_length"])
    assert sum(lengths) / len(lengths) > 1.1, lengths
    # The tree of a head's caches has pairs of tokens: one fewer is there for the next request.
    _check(server, reference, environment, num_uncached=2)


def _check(server: Server, reference: Reference, environment: Mapping[str, str], num_uncached: int = 1) -> None:
    _check_single_requests(server, reference, num_uncached)
    _check_what_is_not_ours_to_set(server)
    server.hang_up(reference.prompt(900, seed=44))
    traffic = Traffic(server, reference, NUM_REQUESTS // 5, seed=11, sets_gamma=False)
    traffic.run()
    assert not traffic.failures, traffic.failures[:3]
    traffic.check_tokens()
    assert {"pruned", "disabled"} <= {report["outcome"] for report in traffic.reports}
    if environment is _RETRACTIONS:
        _check_a_pruned_prompt_is_retracted(server, reference)
    pool = server.state()["draft_pool"]
    assert (pool["num_used"] + pool["num_free"], pool["num_pinned"]) == (pool["num_tokens"], 0)
    assert not server.state()["num_failures"]
    server.flush()
    state = server.state()
    assert (state["num_turns_remembered"], state["draft_pool"]["num_used"]) == (0, 0)
    server.stop()


def _check_single_requests(server: Server, reference: Reference, num_uncached: int) -> None:
    """Dense prompts as plain decoding has them, pruned ones and follow-ups as from the same kept tokens.

    num_uncached: tokens of a pruned prompt that the target is given again with the same prompt.
    """
    short, long = reference.prompt(200, seed=41), reference.prompt(900, seed=42)
    dense, pruned = server.generate(short), server.generate(long, explain=True)
    assert dense["output_ids"] == reference.tokens(short)
    assert pruned["output_ids"] == reference.tokens(long, sparse_prefill="on")
    report = pruned["meta_info"]["spec_stack"]
    assert [long[position] for position in kept_positions(pruned)] == kept_ids(
        reference, long, PrefillConfig(min_prompt_tokens=MIN_PROMPT_TOKENS)
    )
    assert report["outcome"] == "pruned"
    assert pruned["meta_info"]["prompt_tokens"] == len(long)
    again = server.generate(long)
    assert again["output_ids"] == pruned["output_ids"]
    assert report["num_kept_tokens"] - again["meta_info"]["cached_tokens"] == num_uncached
    turn = [*long, *pruned["output_ids"], *reference.user_turn(40, seed=43)]
    for rule in ("freeze", "recall"):
        reply = server.generate(turn, 12, explain=True, follow_up=rule)
        followed = reply["meta_info"]["spec_stack"]
        assert followed["num_cached_tokens"] == len(long) + len(pruned["output_ids"]) - 1
        # What comes back stands at its own place, so that what was behind it is prefilled again.
        num_cached = reply["meta_info"]["cached_tokens"]
        assert rule == "recall" or num_cached >= report["num_kept_tokens"] + 1 - num_uncached
        assert reply["output_ids"] == reference.tokens_over(turn, followed["kept_spans"], 12)
    whole = server.generate(long, sparse_prefill="off")
    assert whole["output_ids"] == reference.tokens(long)


def _check_a_pruned_prompt_is_retracted(server: Server, reference: Reference) -> None:
    """Three replies to one prompt decode together for nine steps or more, at most twelve tokens each; SGLang retracts
    one of those that run at every sixth."""
    prompt, num_new = reference.prompt(700, seed=45), 100
    body = generate_body(prompt, num_new)
    body["sampling_params"]["n"] = 3
    status, replies = server.post("/generate", body)
    assert status == 200, replies
    assert sum(reply["meta_info"]["num_retractions"] for reply in replies) > 0
    expected = reference.tokens(prompt, max_new_tokens=num_new, sparse_prefill="on")
    for reply in replies:
        assert reply["meta_info"]["spec_stack"]["outcome"] == "pruned"
        assert reply["output_ids"] == expected


def _check_what_is_not_ours_to_set(server: Server) -> None:
    """The steps are another's: nothing is said of them, and nobody may set them."""
    report = server.generate([5, 6, 7], 4)["meta_info"]["spec_stack"]
    assert not {"policy", "gamma_trace", "num_proposed"} & set(report)
    status, reply = server.post("/generate", generate_body([5, 6, 7], 4, gamma=2))
    assert (status, "gamma" in reply["error"]["message"]) == (400, True)
