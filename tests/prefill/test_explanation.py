"""`explain=True`: what kept each part of a prompt, as the selection itself had it."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.prefill.explainer import Explainer
from spec_stack.prefill.explanation import Explanation
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.registry import SCORERS
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.rules.attention import ByAttention
from spec_stack.prefill.segments import Segments
from spec_stack.prefill.selection import select
from tests.support.models import make_model

FILLER = "Boats lie in the harbour and gulls sit on the wall.\n"
LINES = {
    "attention": "A bell rings.\n",
    "rare word": "Zanzibar has nine.\n",
}
DOCUMENT = "\n".join(f"def f{index}(x):\n    return x + {index}" for index in range(60))


def explained(seen: str, keep_rate: float, scorer: str = "attention") -> Explanation:
    """A prompt of fillers with one line by each reason; the draft attends most to the lines that hold `seen`."""
    text = "Fetch it.\n" + FILLER * 12 + LINES["rare word"] + FILLER + LINES["attention"] + FILLER * 12
    pieces = re.findall(r"\w+|\s+|[^\w\s]", text + "Does fetch of Zanzibar run?\n")
    config = PrefillConfig(keep_rate=keep_rate, scorer=scorer, chunk_size=1, keep_first=0, keep_last=8)
    importance = torch.full((len(pieces),), 0.01)
    at = 0
    for line in re.findall(r"[^\n]+\n", "".join(pieces)):
        size = len(re.findall(r"\w+|\s+|[^\w\s]", line))
        importance[at : at + size] = 0.1 if seen in line else 0.01 if line == FILLER else 0.008
        at += size
    explainer = Explainer(pieces, config)
    text = PromptText(list(range(len(pieces))), pieces, protected=[(0, 1)])
    inputs = ScoringInputs(text, importance=importance, observer=explainer)
    return explainer.explanation([], select(inputs, config))


def reasons_of(explanation: Explanation) -> dict[str, str]:
    return {explanation.text[span.start : span.stop]: span.reason for span in explanation.kept}


def test_each_line_has_the_least_that_sufficed_to_keep_it() -> None:
    reasons = reasons_of(explained("bell", 0.06))
    assert reasons["Fetch"] == "protected"
    assert reasons[LINES["rare word"]] == "rare word"
    assert reasons[LINES["attention"]] == "attention"
    assert list(reasons.values())[-1] == "ends"
    # The same lines need no rare word where the draft attends to them.
    assert reasons_of(explained("Zanzibar", 0.06))[LINES["rare word"]] == "attention"


def test_the_line_before_what_is_protected_at_the_end_is_an_end() -> None:
    pieces = [*(f"word{at}\n" for at in range(9)), "Do ", "it.\n", "<bot>\n"]
    config = PrefillConfig(keep_rate=0.01, chunk_size=1, keep_first=0, keep_last=1)
    explainer, text = Explainer(pieces, config), PromptText(list(range(len(pieces))), pieces, protected=[(11, 12)])
    inputs = ScoringInputs(text, importance=torch.zeros(len(pieces)), observer=explainer)
    reasons = reasons_of(explainer.explanation([], select(inputs, config)))
    assert reasons == {"Do it.\n": "ends", "<bot>\n": "protected"}


class Halved(ByAttention):
    def score(self, inputs: ScoringInputs, segments: Segments, config: PrefillConfig) -> torch.Tensor:
        return super().score(inputs, segments, config) / 2


def test_a_rule_of_ones_own_and_bm25_name_their_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCORERS, "halved", Halved)
    assert set(reasons_of(explained("bell", 0.06, "halved")).values()) == {"score", "ends", "protected"}
    assert reasons_of(explained("bell", 0.06, "bm25"))[LINES["rare word"]] == "words"


@pytest.fixture(scope="module")
def generator() -> SpecStackGenerator:
    config = SpecStackConfig(PrefillConfig(min_prompt_tokens=64, keep_rate=0.3, on_scoring_failure="raise"))
    return SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", config=config)


@pytest.mark.parametrize(("scorer", "granularity"), [("attention", "lines"), ("bm25", "chunks")])
def test_the_spans_are_the_tokens_that_the_target_has(scorer: str, granularity: str) -> None:
    config = PrefillConfig(min_prompt_tokens=64, keep_rate=0.3, scorer=scorer, granularity=granularity)
    generator = SpecStackGenerator.from_pretrained(
        device="cpu", precision="fp32", config=SpecStackConfig(config), calibration=False
    )
    chat = {"messages": [{"role": "user", "content": f"{DOCUMENT}\n\nWhat does f17 return?"}]}
    ids = {"input_ids": generator.tokenizer(DOCUMENT).input_ids}
    for prompt in (chat, ids, {"prompt": DOCUMENT}, {**chat, "sparse_prefill": "off"}):
        result = generator.generate(**prompt, explain=True, max_tokens=1)
        explanation, metrics = result.explanation, result.metrics
        assert explanation is not None
        assert sum(span.num_tokens for span in explanation.kept) == metrics.num_kept_tokens
        assert len(explanation.tokens) == metrics.num_prompt_tokens
        assert (explanation.importance is None) == (scorer == "bm25" or not metrics.sparse_prefill)
        assert ("dense" in reasons_of(explanation).values()) == (not metrics.sparse_prefill)
        # The spans in tokens, by another route: whole tokens, in order and apart.
        offsets = [len("".join(explanation.tokens[:at])) for at in range(len(explanation.tokens) + 1)]
        edges = [edge for span in explanation.kept for edge in (span.start, span.stop)]
        assert edges == sorted(edges)
        assert set(edges) <= set(offsets)
        unexplained = generator.generate(**prompt, max_tokens=1)
        assert unexplained.explanation is None
        assert unexplained.token_ids == result.token_ids


def test_a_session_tells_what_is_cached_and_what_is_recalled(generator: SpecStackGenerator) -> None:
    messages = [{"role": "user", "content": f"{DOCUMENT}\n\nWhat does f17 return?"}]
    with generator.session() as session:
        first = session.generate(messages=messages, explain=True, max_tokens=4)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And what does f41?"}]
        second = session.generate(messages=messages, explain=True, max_tokens=4)
    assert first.explanation is not None
    assert second.explanation is not None
    counts: Counter[str] = Counter()
    for span in second.explanation.kept:
        counts[span.reason] += span.num_tokens
    assert counts["recalled"] == second.metrics.num_recalled_tokens > 0
    assert sum(counts.values()) == second.metrics.num_kept_tokens
    assert set(counts) == {"cached", "recalled", "dense"}
    assert first.explanation.queries[0].weight == 1
    query = second.explanation.queries[0]
    assert second.explanation.text[query.start : query.stop] == "And what does f41?"


def test_samples_share_one_explanation_and_a_stream_ends_with_it(generator: SpecStackGenerator) -> None:
    result = generator.generate(DOCUMENT, explain=True, n=2, temperature=1.0, max_tokens=2)
    assert [choice.explanation for choice in result.choices] == [result.explanation] * 2
    *others, last = generator.stream(DOCUMENT, explain=True, max_tokens=4)
    assert last.explanation == result.explanation
    assert not any(output.explanation for output in others)


def test_what_cannot_be_explained_is_refused(generator: SpecStackGenerator) -> None:
    with pytest.raises(ValueError, match="explain must be True or False, got 'yes'"):
        generator.generate("a", explain="yes")
    blind = SpecStackGenerator(make_model(seed=1), make_model(seed=2))
    with pytest.raises(ValueError, match="explain=True needs a tokenizer"):
        blind.generate(input_ids=[1, 2], explain=True)
