"""The follow-up experiment's own prompts; its servers need SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from experiments.common.conversations import make_conversation
from experiments.serving.client import Answer
from experiments.serving.follow_ups import Arm, Script, Talk, short

ASSETS = Path(__file__).resolve().parents[2] / "spec_stack" / "assets"


def test_every_fact_is_found_where_it_stands_in_the_prompt() -> None:
    script = Script(AutoTokenizer.from_pretrained(ASSETS / "target"))
    conversation = make_conversation(script.tokenizer, 2000, 12, 4000, "mixed")
    ids = script.chat(conversation.ask(0, [])[0]["content"])
    for fact in conversation.facts[::5]:
        start, stop = script.span(ids, fact.text)
        text = script.tokenizer.decode(ids[start:stop])
        assert fact.text in text
        assert len(text) < len(fact.text) + 12


class _Echo:
    def ask(self, input_ids: Any, num_new: int, **custom: Any) -> Answer:
        return Answer(0.0, [0.5], [7] * num_new, meta_info={"cached_tokens": len(input_ids) - 1, "spec_stack": custom})


def test_a_conversation_goes_on_from_its_replies_in_the_templates_words() -> None:
    script = Script(AutoTokenizer.from_pretrained(ASSETS / "target"))
    first = script.document(300, 5)
    talk = Talk(Arm(_Echo(), {"follow_up": "freeze"}), script.tokenizer, first)  # type: ignore[arg-type]
    assert talk.ask(3, explain=True).meta_info["spec_stack"] == {"explain": True, "follow_up": "freeze"}
    talk.go_on("And then?")
    talk.ask(3)
    assert talk.turns[1]["prompt"] > len(first) + 3
    assert short([talk.turns, talk.turns]) == {
        "ttft_s": [0.5, 0.5],
        "cached": [len(first) - 1, talk.turns[1]["prompt"] - 1],
    }
