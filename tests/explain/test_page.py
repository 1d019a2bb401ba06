"""The page, read by a parser: always run, no browser needed."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.cli.main import main
from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.explain.observe import explain_live, watch
from spec_stack.explain.page import render
from tests.support.models import make_model, make_tokenizer

HOSTILE = "</script><img src=x onerror=alert(1)><!-- {{data}} {{title}} & \u2028"
# Attributes that make a browser fetch something.
FETCHING = {"src", "href", "srcset", "action", "data", "poster", "background"}


class Reader(HTMLParser):
    """Tags in order, what would be fetched, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.scripts: list[str] = []
        self.title = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attributes if name in FETCHING]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, text: str) -> None:
        if self.tags and self.tags[-1] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += text
        if self.tags and self.tags[-1] == "title" and not self.title:
            self.title = text


def data_of(page: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(Reader(page).scripts[0])
    return shown


@pytest.fixture(scope="module")
def watched() -> SpecStackGenerator:
    config = SpecStackConfig(PrefillConfig(min_prompt_tokens=64, granularity="chunks", on_scoring_failure="raise"))
    return SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", config=config)


PROMPT = "\n".join(f"def f{index}(x):\n    return x + {index}" for index in range(40)) + "\ndef f"


def test_hostile_text_is_data_and_never_markup() -> None:
    signals = DraftSignals([1.0, 2.0], [0.5, 0.5])
    step = StepRecord(HOSTILE, 0, "p", "fp32", "t", True, 0.5, 2, 1, 2, signals, 0.1, 0.2, 0.0, proposer=HOSTILE)
    prompt = {
        "tokens": [HOSTILE],
        "states": "k",
        "importance": [1.0],
        "votes": [1.0],
        "queries": [{"start": 0, "stop": 1, "weight": 0.83, "text": HOSTILE}],
    }
    answer = [{"text": HOSTILE, "step": 0, "writer": "draft"}, {"text": "b", "step": 0, "writer": HOSTILE}]
    turn = {"question": HOSTILE, "prompt": prompt, "answer": answer, "steps": [asdict(step)], "metrics": {}}
    explanation = {"title": HOSTILE, "about": {HOSTILE: HOSTILE}, "runs": [{"name": HOSTILE, "turns": [turn]}]}
    page = render(explanation)
    assert data_of(page) == explanation
    read = Reader(page)
    assert "img" not in read.tags
    assert read.tags.count("script") == 2
    assert read.title == HOSTILE


def test_the_page_asks_nothing_of_a_network(watched: SpecStackGenerator) -> None:
    page = render(
        explain_live(watched, title="t", pair="p", options={"max_tokens": 4}, messages=None, questions=[PROMPT])
    )
    read = Reader(page)
    assert read.fetched == []
    assert "link" not in read.tags
    without_data = page.replace(read.scripts[0], "")
    # The one address is the name of SVG's markup language, which nobody fetches.
    assert set(re.findall(r"https?://[^\s\"']+", without_data)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(fetch|XMLHttpRequest|import|innerHTML|eval)\b", read.scripts[1])
    assert "@import" not in page
    assert "url(" not in page


def test_what_is_shown_is_what_the_generator_does(watched: SpecStackGenerator) -> None:
    options = {"max_tokens": 12, "keep_rate": 0.3, "gamma": 3}
    explanation = explain_live(
        watched, title="t", pair="p", options=options, messages=None, questions=[PROMPT], compare=True
    )
    sparse, dense = (run["turns"][0] for run in explanation["runs"])
    alone = watched.generate(PROMPT, return_records=True, **options)
    assert "".join(token["text"] for token in sparse["answer"]) == alone.text
    assert [step["gamma"] for step in sparse["steps"]] == [record.gamma for record in alone.records or []]
    states = sparse["prompt"]["states"]
    assert "".join(sparse["prompt"]["tokens"]) == f"<|bos|>{PROMPT}"
    assert states.count("k") == alone.metrics.num_kept_tokens < len(states)
    assert set(dense["prompt"]["states"]) == {"k"}
    assert dense["prompt"]["importance"] is None


def test_the_kept_chunks_are_those_with_the_most_votes(watched: SpecStackGenerator) -> None:
    explanation = explain_live(
        watched, title="t", pair="p", options={"max_tokens": 2, "keep_rate": 0.3}, messages=None, questions=[PROMPT]
    )
    prompt = explanation["runs"][0]["turns"][0]["prompt"]
    assert len(prompt["importance"]) == len(prompt["tokens"])
    config, votes = watched.config.prefill, prompt["votes"]
    free = range(config.keep_first, len(votes) - config.keep_last)
    states = {chunk: prompt["states"][prompt["borders"][chunk]] for chunk in free}
    kept = [votes[chunk] for chunk in free if states[chunk] == "k"]
    dropped = [votes[chunk] for chunk in free if states[chunk] == "d"]
    assert kept
    assert dropped
    assert min(kept) >= max(dropped)


DOCUMENT = "\n".join(f"def f{index}(x):\n    return x + {index}" for index in range(60))
QUESTION, FORMAT = "What does f17 return?", "Answer in one word.\nUse no punctuation.\nDo not explain."


def queries_of(text: str, **prefill: Any) -> list[dict[str, Any]]:
    """What scores a user message, the tokens of each segment checked."""
    config = SpecStackConfig(PrefillConfig(min_prompt_tokens=64, on_scoring_failure="raise", **prefill))
    generator = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", config=config)
    run = watch(generator, "r", [], [text], max_tokens=2)
    prompt = run["turns"][0]["prompt"]
    tokens, queries = prompt["tokens"], prompt["queries"]
    for query in queries:
        start, stop = query["start"], query["stop"]
        assert start >= len(tokens) or query["text"] == "".join(tokens[start:stop])
    weights = [query["weight"] for query in queries]
    assert weights == sorted(weights, reverse=True)
    assert all(0 < weight <= 1 for weight in weights)
    return list(queries)


def test_the_question_scores_wherever_it_stands() -> None:
    behind = queries_of(f"{DOCUMENT}\n\n{QUESTION}\n\n{FORMAT}")
    assert behind[0]["text"].strip() == QUESTION
    assert behind[0]["weight"] == 1
    assert set(FORMAT.split("\n")) <= {query["text"].strip() for query in behind}
    first = queries_of(f"{QUESTION}\n\n{DOCUMENT}")
    assert QUESTION in [query["text"].strip() for query in first]


def test_a_long_question_without_spaces_heads_its_turn(watched: SpecStackGenerator) -> None:
    (turn,) = watch(watched, "r", None, [f"{PROMPT}\n{'問' * 130}"], max_tokens=1)["turns"]
    assert turn["question"] == "問" * 119 + "…"


def test_a_draft_with_another_tokenizer_has_the_same_segments() -> None:
    tokenizer, other = make_tokenizer("a b c d ab abc cd ?", "<t>"), make_tokenizer("d abc c b a bc ?", "<s>")
    config = SpecStackConfig(PrefillConfig(min_prompt_tokens=64, on_scoring_failure="raise"))
    spans = []
    for draft_tokenizer in (None, other):
        models = make_model(seed=1, vocab=20), make_model(seed=2, vocab=20)
        generator = SpecStackGenerator(*models, tokenizer, config=config, draft_tokenizer=draft_tokenizer)
        run = watch(generator, "r", None, ["abcdab?" * 90], max_tokens=2)
        spans.append({(query["start"], query["stop"]) for query in run["turns"][0]["prompt"]["queries"]})
    assert spans[0] == spans[1]
    assert len(spans[0]) > 1


def test_bm25_is_asked_by_the_words_of_the_question() -> None:
    for text in (f"{QUESTION}\n\n{DOCUMENT}", f"{DOCUMENT}\n\n{QUESTION}\n\n{FORMAT}"):
        (query,) = queries_of(text, scorer="bm25")
        assert (query["text"].strip(), query["weight"]) == (QUESTION, 1.0)
    unmarked = queries_of(f"{DOCUMENT}\n\n{FORMAT}", scorer="bm25")
    assert [query["text"].strip() for query in unmarked[:3]] == FORMAT.split("\n")[::-1]


def test_a_look_ahead_that_scores_nothing_is_not_shown() -> None:
    config = SpecStackConfig(
        PrefillConfig(
            min_prompt_tokens=64,
            scorer="bm25",
            scoring_queries="look_ahead",
            look_ahead=4,
            on_scoring_failure="raise",
        )
    )
    generator = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", config=config)
    questions = [f"{DOCUMENT}\n\n{QUESTION}", f"{DOCUMENT}\n\n{QUESTION}"]
    for turn in watch(generator, "r", [], questions, max_tokens=2)["turns"]:
        (query,) = turn["prompt"]["queries"]
        assert query["text"].strip() == QUESTION
        assert query["stop"] < len(turn["prompt"]["tokens"])
        assert query["start"] >= turn["metrics"]["num_cached_tokens"]


def test_the_papers_rule_is_asked_by_the_last_token_and_the_look_ahead() -> None:
    last, ahead = queries_of(f"{DOCUMENT}\n\n{QUESTION}", scoring_queries="look_ahead", look_ahead=4)
    assert (last["stop"], last["stop"] - last["start"], last["weight"]) == (ahead["start"], 1, 1.0)
    assert (ahead["stop"] - ahead["start"], ahead["weight"]) == (4, 1.0)
    assert ahead["text"]
    assert len(queries_of(f"{DOCUMENT}\n\n{QUESTION}", scoring_queries="look_ahead", look_ahead=0)) == 1


def test_the_turns_of_a_session_show_what_is_cached_and_what_is_new(watched: SpecStackGenerator) -> None:
    questions = [f"{PROMPT}\nWhat is f3?", "And f7?", "Thanks."]
    turns = watch(watched, "r", [], questions, max_tokens=6)["turns"]
    assert [turn["question"] for turn in turns] == ["What is f3?", "And f7?", "Thanks."]
    for turn in turns[1:]:
        metrics, states = turn["metrics"], turn["prompt"]["states"]
        num_new = sum(state in "kp" for state in states)
        assert states.count("r") == metrics["num_recalled_tokens"]
        assert states.count("c") + states.count("r") + num_new == metrics["num_kept_tokens"]
        assert "d" not in states[metrics["num_cached_tokens"] :]
    assert "d" in turns[1]["prompt"]["states"]


def test_the_command_says_what_scored_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    text = f"{DOCUMENT}\n\n{QUESTION}\n\n{FORMAT}"
    assert main(["explain", text, "--chat", "--sparse-prefill", "on", "--device", "cpu", "--out", str(page)]) == 0
    queries = data_of(page.read_text(encoding="utf-8"))["runs"][0]["turns"][0]["prompt"]["queries"]
    said = capsys.readouterr().out.splitlines()[1:]
    assert said == [f"scoring query, weight {one['weight']:.2f}: {one['text'].strip()}" for one in queries[:3]]
    assert any(line.endswith(QUESTION) for line in said)
