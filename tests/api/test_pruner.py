"""The Pruner: shorter messages, verbatim lines, and decisions that hold over turns."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spec_stack import PrefillConfig, Pruner, PruneResult, SpecStackConfig
from spec_stack.config import SparsePrefill
from spec_stack.hf.loading import ASSETS
from tests.support import models

CODE = (Path(__file__).parents[1] / "support" / "code_to_prune.txt").read_text()
OTHER = (Path(__file__).parents[1] / "support" / "other_code_to_prune.txt").read_text()
QUESTION = "What is the value of MAX_OCCURRENCES?"


@pytest.fixture(scope="module")
def pruner() -> Pruner:
    return Pruner.from_pretrained(device="cpu")


def is_subsequence(shorter: str, text: str) -> bool:
    """Whether the lines of a text are those of another, in order, each as it was."""
    lines = iter(text.splitlines(keepends=True))
    return all(line in lines for line in shorter.splitlines(keepends=True))


def chat(*turns: str) -> list[dict[str, Any]]:
    return [{"role": "user" if at % 2 == 0 else "assistant", "content": text} for at, text in enumerate(turns)]


def test_kept_spans_are_the_text_and_the_counts_are_within_the_budget(pruner: Pruner) -> None:
    result = pruner.prune(CODE, max_tokens=400, question=QUESTION, marker="")
    assert result.num_kept_tokens <= 400 < result.num_tokens
    (kept,) = result.kept
    assert (kept.message, kept.part) == (0, None)
    assert result.messages == "".join(CODE[start:stop] for start, stop in kept.spans)
    assert len(pruner.tokenizer(result.messages).input_ids) <= 400
    assert QUESTION not in result.messages
    assert 'on: sparse_prefill="on"' in result.reason


def test_no_budget_is_exceeded_by_the_rest_of_a_segment_at_an_end(pruner: Pruner) -> None:
    """The template's tokens leave lines that nearly fit, and the ends are rounded up to whole lines."""
    messages = chat("\n".join(f"def f{at}(a):\n    return a + {at}\n" for at in range(70)) + "\nWhat does f17 return?")
    budgets = {"What is f12?": (92, 100, 124), "Where is f3?": (92, 106, 130)}
    for question, numbers in budgets.items():
        for most in numbers:
            assert pruner.prune(messages, max_tokens=most, question=question).num_kept_tokens <= most


@pytest.mark.parametrize(
    ("switch", "shortest", "prunes"), [("on", 1 << 20, True), ("auto", 1 << 20, False), ("off", 1, False)]
)
def test_its_configuration_switches_it_on_and_off(switch: SparsePrefill, shortest: int, prunes: bool) -> None:
    config = PrefillConfig(sparse_prefill=switch, min_prompt_tokens=shortest)
    own = Pruner.from_pretrained(device="cpu", config=config)
    result = own.prune(CODE, question=QUESTION)
    assert (result.num_kept_tokens < result.num_tokens) is prunes
    # A call's own amount goes before it.
    assert own.prune(CODE, question=QUESTION, keep_rate=0.5).num_kept_tokens < 0.6 * result.num_tokens


@pytest.mark.parametrize("as_chat", [False, True])
def test_a_question_of_its_own_finds_its_answer(pruner: Pruner, as_chat: bool) -> None:
    given = chat(CODE) if as_chat else CODE
    shorter = pruner.prune(given, keep_rate=0.2, question=QUESTION).messages
    assert "MAX_OCCURRENCES = " in str(shorter)


def test_lines_are_whole_and_a_marker_stands_for_every_gap(pruner: Pruner) -> None:
    text = "".join(f"    line {at}: value_{at} = {at}\n" for at in range(120))
    result = pruner.prune(text, keep_rate=0.3, marker="[gap]")
    assert is_subsequence(result.messages.replace("[gap]\n", ""), text)
    (kept,) = result.kept
    edges = [0, *(edge for span in kept.spans for edge in span), len(text)]
    num_gaps = sum(start < stop for start, stop in zip(edges[::2], edges[1::2], strict=True))
    assert result.messages.count("[gap]\n") == num_gaps > 3


def test_only_texts_change_and_the_shape_is_as_given(pruner: Pruner) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    text = {"type": "text", "text": CODE, "cache_control": 1}
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": CODE[:600]},
        {"role": "user", "content": [text, image, {"type": "text", "text": OTHER}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": OTHER, "name": "look"},
        {"role": "user", "content": QUESTION},
    ]
    given = copy.deepcopy(messages)
    result = pruner.prune(messages, keep_rate=0.2)
    assert messages == given
    shorter = result.messages
    assert [set(message) for message in shorter] == [set(message) for message in messages]
    assert shorter[0] == messages[0]
    assert shorter[2] == messages[2]
    assert shorter[4] == messages[4]
    assert shorter[1]["content"][1] == image
    assert shorter[1]["content"][0]["cache_control"] == 1
    for short, whole in ((shorter[1]["content"][0]["text"], CODE), (shorter[3]["content"], OTHER)):
        assert 0 < len(short) < len(whole)
    assert {(kept.message, kept.part) for kept in result.kept} == {(0, None), (1, 0), (1, 2), (3, None), (4, None)}


def test_what_is_protected_stays_with_its_line(pruner: Pruner) -> None:
    wanted = [line for line in CODE.splitlines() if "searchsorted" in line]
    result = pruner.prune(CODE, keep_rate=0.1, protect=["searchsorted"])
    assert len(wanted) > 1
    assert all(line in result.messages for line in wanted)


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        (CODE, {}, "shorter than min_prompt_tokens"),
        (CODE, {"keep_rate": 1.0}, "keep_rate is 1.0"),
        (CODE, {"max_tokens": 10**6}, "no more than max_tokens"),
        ("a b. " * 40, {"keep_rate": 0.5, "protect": ["a"]}, ""),
        # More than the draft's positions.
        ("word " * 17000, {"keep_rate": 0.1}, "the draft"),
    ],
    ids=["short", "rate 1", "budget", "protected", "long"],
)
def test_a_prompt_that_is_not_pruned_comes_back_as_it_was(
    pruner: Pruner, text: str, options: dict[str, Any], reason: str
) -> None:
    result = pruner.prune(text, **options)
    assert (result.messages, result.num_kept_tokens) == (text, result.num_tokens)
    assert reason in result.reason


def characters(result: PruneResult) -> set[int]:
    """The kept characters of the first text, which are what came back of it."""
    kept = [at for start, stop in result.kept[0].spans for at in range(start, stop)]
    assert kept == sorted(set(kept))
    return set(kept)


def test_a_conversation_keeps_what_it_kept_and_recalls_to_its_place(pruner: Pruner) -> None:
    conversation, text = pruner.conversation(), f"{CODE}\nWhat does add_votes do?"
    messages = chat(text)
    first = conversation.prune(messages, keep_rate=0.2, marker="")
    messages += chat("", "It adds votes to units.", "Thanks. Go on.")[1:]
    quiet = conversation.prune(messages, keep_rate=0.2, marker="")
    assert characters(first) <= characters(quiet)
    assert quiet.messages[1] == messages[1]
    dropped = next(line for line in CODE.splitlines() if "radix =" in line)
    messages += chat("", "Yes.", "What is radix = (len(words) + 1)?")[1:]
    recalled = conversation.prune(messages, keep_rate=0.2, marker="")
    assert characters(quiet) < characters(recalled)
    assert dropped not in first.messages[0]["content"]
    assert dropped in recalled.messages[0]["content"]
    assert recalled.num_recalled_tokens > 0
    assert recalled.messages[0]["content"] == "".join(text[at] for at in sorted(characters(recalled)))
    # The draft's cache has changed nothing.
    assert pruner.prune(messages[:1], keep_rate=0.2, marker="").messages == first.messages


@pytest.mark.parametrize("again", [[], ["It adds votes to units.", "Thanks. Go on."]], ids=["same", "follow-up"])
def test_what_a_later_call_protects_comes_back(pruner: Pruner, again: list[str]) -> None:
    conversation, text = pruner.conversation(), f"{CODE}\nWhat does add_votes do?"
    dropped = next(line for line in CODE.splitlines() if "radix =" in line)
    first = conversation.prune(chat(text), keep_rate=0.2)
    assert dropped not in first.messages[0]["content"]
    for options in ({"keep_rate": 0.2}, {"max_tokens": 10_000}):
        second = conversation.prune(chat(text, *again), protect=["radix ="], **options)
        assert dropped in second.messages[0]["content"]


def test_a_question_in_the_newest_answer_recalls_what_it_is_about(pruner: Pruner) -> None:
    conversation, text = pruner.conversation(), f"{CODE}\nWhat does add_votes do?"
    first = conversation.prune(chat(text), keep_rate=0.2)
    assert "MAX_OCCURRENCES = " not in str(first.messages)
    second = conversation.prune(chat(text, f"It adds votes. {QUESTION}", "Yes, tell me."), keep_rate=0.2)
    assert second.num_recalled_tokens > 0
    assert "MAX_OCCURRENCES = " in str(second.messages)


def test_an_edited_conversation_goes_back(pruner: Pruner) -> None:
    conversation = pruner.conversation()
    conversation.prune(chat(CODE, "Fine.", QUESTION), keep_rate=0.2)
    result = conversation.prune(chat(OTHER, "Fine.", QUESTION), keep_rate=0.2, marker="")
    assert result.messages[0]["content"] == "".join(OTHER[at] for at in sorted(characters(result)))
    assert result.num_recalled_tokens == 0
    assert len(characters(result)) < len(OTHER) / 2


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ("", {}, "no text to prune"),
        ([], {}, "no text to prune"),
        (None, {}, "a text or a list"),
        ([{"content": "x"}], {}, "'role'"),
        ([{"role": "user", "content": 3}], {}, "a text 'content'"),
        ("x", {"max_tokens": 0}, "max_tokens must be"),
        ("x", {"question": 3}, "question must be"),
        ("x", {"protect": "abc"}, "protect must be"),
        ("x", {"marker": 3}, "marker must be"),
        ("x", {"keep_rate": 0.2, "max_tokens": 10}, "not both"),
    ],
)
def test_what_cannot_be_used_is_named(pruner: Pruner, messages: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pruner.prune(messages, **options)


def test_a_draft_that_is_not_there_or_cannot_score_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        Pruner.from_pretrained(tmp_path / "nothing")
    with pytest.raises(ValueError, match="cannot load the tokenizer"):
        Pruner.from_pretrained(ASSETS / "draft", device="cpu")
    for tokenizer in (None, SimpleNamespace(is_fast=False)):
        with pytest.raises(ValueError, match="needs the draft's tokenizer, a fast one: it gives character offsets"):
            Pruner(models.make_model(), tokenizer)
    with pytest.raises(ValueError, match="config must be a SessionConfig, got dict"):
        Pruner.from_pretrained(device="cpu").conversation({"recall": False})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="config must be a PrefillConfig, got SpecStackConfig"):
        Pruner.from_pretrained(config=SpecStackConfig())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="draft must be a loaded transformers model, got 'owner/name'"):
        Pruner("owner/name", models.make_tokenizer("a b"))  # type: ignore[arg-type]


def test_without_a_template_roles_stand_in_its_place_and_a_text_is_read_as_it_is() -> None:
    tokenizer = models.make_tokenizer("a b c d e . : u s r t i n Ġ Ċ ?", "<s>", bos=True)
    pruner = Pruner(models.make_model(vocab=64), tokenizer, PrefillConfig(chunk_size=4, keep_last=1))
    text = "a b c.\nb a d.\n" * 20
    for given in (text, [{"role": "user", "content": text}]):
        result = pruner.prune(given, keep_rate=0.3, marker="")
        shorter = result.messages if isinstance(given, str) else result.messages[0]["content"]
        assert 0 < len(shorter) < len(text)
        assert is_subsequence(shorter, text)


def test_half_a_character_stays_as_it_is(pruner: Pruner) -> None:
    """Clients cut texts by UTF-16 units, which leaves lone surrogates."""
    for half in ("\ud83d", "\ude00", "\ud83d\ud83d", "\ude00\ud83d"):
        line = f"# half {half} here\n"
        text = f"{CODE}{line}{OTHER}\n{QUESTION}"
        result = pruner.prune(text, keep_rate=0.3, protect=[line])
        assert line in result.messages
        whole = "\ufffd" * len(half)
        expected = pruner.prune(text.replace(half, whole), keep_rate=0.3, protect=[line.replace(half, whole)])
        assert result.kept == expected.kept


def test_a_part_whose_text_is_null_is_none(pruner: Pruner) -> None:
    picture = {"type": "image", "text": None, "image": "x"}
    result = pruner.prune([{"role": "user", "content": [picture, f"{CODE}\n{QUESTION}"]}], max_tokens=np.int64(300))  # type: ignore[arg-type]
    assert result.messages[0]["content"][0] == picture
    assert [kept.part for kept in result.kept] == [1]
    assert result.num_kept_tokens <= 300


def test_a_second_thread_is_refused_and_the_first_is_not_disturbed(pruner: Pruner) -> None:
    text, conversation = f"{CODE}\n{QUESTION}", pruner.conversation()

    def from_another_thread(*_: object) -> None:
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="one for each thread"):
            pool.submit(conversation.prune, text, keep_rate=0.2).result()

    result = conversation.prune(text, keep_rate=0.2, on_progress=from_another_thread)
    assert result == pruner.prune(text, keep_rate=0.2)
    assert conversation.prune(text, keep_rate=0.2).messages == result.messages


def test_a_cancelled_turn_goes_on_from_what_the_draft_has_read(pruner: Pruner) -> None:
    text, conversation, steps = f"{CODE * 6}\n{QUESTION}", pruner.conversation(), []

    def until_half(num_done: int, num_total: int, phase: str) -> None:
        steps.append(num_done)
        if num_done > num_total / 2:
            raise TimeoutError("late")

    with pytest.raises(TimeoutError, match="late"):
        conversation.prune(text, keep_rate=0.2, on_progress=until_half)
    num_read = conversation.num_cached_tokens
    assert num_read > 1000
    totals: list[int] = []
    result = conversation.prune(text, keep_rate=0.2, on_progress=lambda _, total, phase: totals.append(total))
    assert totals[0] == result.num_tokens - num_read
    assert result.messages == pruner.prune(text, keep_rate=0.2).messages


def test_the_check_tells_how_much_of_the_drafts_attention_is_dropped(pruner: Pruner) -> None:
    less, more = (pruner.prune(CODE, keep_rate=rate, max_dropped_attention=1) for rate in (0.3, 0.6))
    assert less.num_kept_tokens == pruner.prune(CODE, keep_rate=0.3).num_kept_tokens
    assert 1 > (less.dropped_attention or 0) > (more.dropped_attention or 0) > 0
    assert "of the draft's attention is dropped" in less.reason
    next_rate = pruner.prune(CODE, keep_rate=0.3, max_dropped_attention=less.dropped_attention or 0)
    assert next_rate.messages == less.messages
    whole = pruner.prune(CODE, keep_rate=0.3, max_dropped_attention=0)
    assert (whole.messages, len(whole.tried_rates)) == (CODE, 2)
    assert pruner.prune(CODE, keep_rate=0.3).dropped_attention is None
    # A budget holds.
    budget = pruner.prune(CODE, max_tokens=300, max_dropped_attention=0)
    assert (budget.num_kept_tokens <= 300, len(budget.tried_rates)) == (True, 1)


def test_a_conversation_is_checked_turn_by_turn(pruner: Pruner) -> None:
    first, second = chat(f"{CODE}\n{QUESTION}"), chat(f"{CODE}\n{QUESTION}", "It is 3.", "Why?")
    conversation = pruner.conversation()
    kept = conversation.prune(first, keep_rate=0.3, max_dropped_attention=1)
    assert kept.num_kept_tokens == pruner.prune(first, keep_rate=0.3).num_kept_tokens < kept.num_tokens
    whole = conversation.prune(second, keep_rate=0.3, max_dropped_attention=0)
    assert whole.messages == second
    assert whole.reason.startswith("off: too much of the draft's attention")
    # What was checked once goes on unchecked.
    assert conversation.prune(chat(CODE, "Yes.", "No?"), keep_rate=0.3).dropped_attention is None
