"""Structured output: every answer fits, and speculation changes nothing about it."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LogitsProcessorList

from spec_stack import SpecStackGenerator
from spec_stack.hf.answer_parser import ForcedCall, ToolFormat
from spec_stack.hf.loading import ASSETS
from spec_stack.hf.structured import Grammars, read_format
from tests.support import reference
from tests.support.forwards import forwards_of
from tests.support.models import make_model

pytest.importorskip("llguidance", reason="needs the extra `structured`")
# Another implementation of the same grammars.
xgrammar = pytest.importorskip("xgrammar", reason="needs the extra `dev`")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Give a name and an age as JSON."}]
REGEX = {"type": "regex", "pattern": "(yes|no)( (yes|no)){2,3}"}
GRAMMAR = {"type": "grammar", "grammar": 'root ::= "(" inner ")"\ninner ::= root | "x, y, z"'}


def fits(text: str) -> bool:
    person = json.loads(text)
    return set(person) == {"name", "age"} and len(person["name"]) <= 6 and 0 <= person["age"] <= 150


class PlainMask:
    """A grammar for transformers' own generate, written anew: every row by a new matcher, from the beginning."""

    def __init__(self, generator: SpecStackGenerator, num_prompt_tokens: int, compiled: Any) -> None:
        self._num_prompt_tokens, self._compiled = num_prompt_tokens, compiled
        special = generator.tokenizer.added_tokens_decoder.items()
        ends = generator.pair.end_ids
        self._never = [token_id for token_id, token in special if token.special and token_id not in ends]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        matcher = xgrammar.GrammarMatcher(self._compiled)
        for token_id in input_ids[0, self._num_prompt_tokens :].tolist():
            if not matcher.accept_token(token_id):
                return scores
        if matcher.is_terminated():
            return scores
        bitmask = xgrammar.allocate_token_bitmask(1, scores.shape[-1])
        matcher.fill_next_token_bitmask(bitmask)
        allowed = [bool(int(bitmask[0, at // 32]) >> (at % 32) & 1) for at in range(scores.shape[-1])]
        scores = scores.masked_fill(~torch.tensor(allowed), -torch.inf)
        scores[:, self._never] = -torch.inf
        return scores


def compiler_of(generator: SpecStackGenerator) -> Any:
    info = xgrammar.TokenizerInfo.from_huggingface(
        generator.tokenizer, vocab_size=generator.pair.vocab_size, stop_token_ids=sorted(generator.pair.end_ids)
    )
    return xgrammar.GrammarCompiler(info)


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
def test_greedy_answers_are_those_of_transformers_with_the_same_grammar(
    kind: str, embedded: SpecStackGenerator
) -> None:
    compiler = compiler_of(embedded)
    compiled, form = {
        "json_schema": (compiler.compile_json_schema(SCHEMA, any_whitespace=False), FORMAT),
        "regex": (compiler.compile_regex(REGEX["pattern"]), REGEX),
        "grammar": (compiler.compile_grammar(GRAMMAR["grammar"]), GRAMMAR),
    }[kind]
    prompt = embedded.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    mask = PlainMask(embedded, len(prompt), compiled)
    expected = reference.greedy(embedded.target, prompt, 40, logits_processor=LogitsProcessorList([mask]))
    ends = [at for at, token_id in enumerate(expected) if token_id in embedded.pair.end_ids]
    expected = expected[: ends[0] + 1] if ends else expected
    for options in ({"gamma": 0}, {"gamma": 4}, {"policy": "throughput"}, {"policy": "heuristic"}):
        more: dict[str, Any] = options
        result = embedded.generate(messages=MESSAGES, max_tokens=40, response_format=form, **more)
        assert result.token_ids == expected
    assert result.metrics.num_accepted > 0


def test_sampled_answers_fit_too(embedded: SpecStackGenerator) -> None:
    for seed in range(2):
        options: dict[str, Any] = {"temperature": 1.2, "seed": seed, "gamma": 4, "messages": MESSAGES, "max_tokens": 60}
        assert fits(embedded.generate(response_format=FORMAT, **options).text)
        answer = embedded.generate(response_format=REGEX, **options)
        assert re.fullmatch(REGEX["pattern"], answer.text)
        assert answer.finish_reason == "eos"
        some = embedded.generate(response_format={"type": "json_object"}, **options)
        assert some.text.startswith("{")
        assert some.finish_reason == "length" or isinstance(json.loads(some.text), dict)


# A grammar is one of the processors, whose law tests/hf/test_processors.py shows.
@pytest.mark.slow
@pytest.mark.nightly
def test_sampled_answers_have_the_law_of_plain_decoding(embedded: SpecStackGenerator) -> None:
    """Of few possible answers, against those of 0 drafted tokens, whose rows are never judged."""
    form = {"type": "regex", "pattern": "(yes|no|maybe) (yes|no)"}
    options: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 20, "temperature": 1.5, "response_format": form}
    counts = [
        Counter(embedded.generate(gamma=gamma, seed=seed, **options).text for seed in range(first, first + 80))
        for gamma, first in ((0, 0), (3, 10_000))
    ]
    texts = sorted(set(counts[0]) | set(counts[1]))
    from scipy.stats import chi2_contingency

    table = [[count[text] for text in texts if counts[0][text] + counts[1][text] >= 10] for count in counts]
    assert len(table[0]) >= 3
    assert chi2_contingency(table).pvalue > 1e-3


def test_the_draft_keeps_to_the_grammar_and_certain_tokens_cost_it_nothing(embedded: SpecStackGenerator) -> None:
    fixed = "the answer is (forty-two|forty-three), and nothing else at all"
    form = {"type": "regex", "pattern": fixed}
    with forwards_of(embedded.draft) as forwards:
        result = embedded.generate(messages=MESSAGES, max_tokens=60, gamma=6, response_format=form)
    assert re.fullmatch(fixed, result.text)
    # Every proposed token had a forward of its own, but for those beside which nothing is allowed.
    assert len(forwards) <= result.metrics.num_proposed


def test_a_forced_calls_marks_are_the_tokens_that_the_template_writes() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    vocab_size, end_ids = len(tokenizer), [tokenizer.eos_token_id]
    grammars = Grammars(tokenizer, vocab_size)
    written = ToolFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
    schema = '{"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}'
    ids = tokenizer('<tool_call>\n{"name": "f", "arguments": {"q": "<a"}}\n</tool_call>', add_special_tokens=False)
    ids = ids.input_ids
    marks = [tokenizer.convert_tokens_to_ids(mark) for mark in ("<tool_call>", "</tool_call>")]
    assert [ids[0], ids[-1]] == marks
    forced = ForcedCall(written, {"f": schema})
    grammar = grammars.compile(forced, end_ids, 0)
    assert grammar is not None
    for one in (grammar.fork(), grammar):
        allowed = [one.mask(ids[:at], torch.zeros(1, vocab_size))[0] > -torch.inf for at in range(len(ids))]
        assert all(row[token_id] for row, token_id in zip(allowed, ids, strict=True))
        assert [at for at, row in enumerate(allowed) if row[marks].any() and row.sum() == 1] == [0, len(ids) - 1]
        # In the argument's text they are as good as any other.
        assert max(int(row.sum()) for row in allowed) > 100


@pytest.mark.parametrize("surplus", [-1, 5])
def test_a_tokenizer_has_more_tokens_than_the_model_or_fewer(surplus: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    vocab_size = len(tokenizer) + surplus
    grammar = Grammars(tokenizer, vocab_size).compile({"type": "regex", "pattern": "a+"}, [tokenizer.eos_token_id], 0)
    assert grammar is not None
    allowed = grammar.mask([], torch.zeros(1, vocab_size))[0].isfinite().nonzero()[:, 0].tolist()
    assert allowed
    assert set("".join(tokenizer.convert_ids_to_tokens(allowed))) == {"a"}


def test_in_a_session_every_answer_begins_its_grammar_anew(embedded: SpecStackGenerator) -> None:
    session, messages = embedded.session(), list(MESSAGES)
    for _ in range(2):
        result = session.generate(messages=messages, max_tokens=60, response_format=FORMAT, gamma=4)
        assert fits(result.text)
        messages += [{"role": "assistant", "content": result.text}, {"role": "user", "content": "Another one."}]
    assert result.metrics.num_cached_tokens > 0


def test_a_grammar_beside_sparse_prefill_and_processors(embedded: SpecStackGenerator) -> None:
    document = "Tom is 7 years old. " * 60
    result = embedded.generate(
        messages=[{"role": "user", "content": document + "Give a name and an age as JSON."}],
        max_tokens=60,
        response_format=FORMAT,
        sparse_prefill="on",
        repetition_penalty=1.1,
        gamma=4,
    )
    assert result.metrics.sparse_prefill
    assert fits(result.text)


def test_what_cannot_be_compiled_or_is_no_format_is_refused_at_the_call(embedded: SpecStackGenerator) -> None:
    refused: Sequence[tuple[Any, str]] = (
        ("json", "response_format must be"),
        ({"type": "xml"}, "response_format must be"),
        ({"type": "json_schema"}, "holds no schema"),
        ({"type": "regex", "pattern": ""}, "holds no text"),
        ({"type": "regex", "pattern": "(("}, "cannot be compiled"),
        ({"type": "grammar", "grammar": "root ::= ("}, "cannot be compiled"),
        ({"type": "json_schema", "schema": {"type": "nonsense"}}, "cannot be compiled"),
    )
    for form, message in refused:
        with pytest.raises(ValueError, match=message):
            embedded.stream(messages=MESSAGES, response_format=form)
    with pytest.raises(ValueError, match="end-of-sequence"):
        embedded.stream(messages=MESSAGES, response_format=FORMAT, ignore_eos=True)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        SpecStackGenerator(make_model(seed=1), make_model(seed=2)).stream(input_ids=[3], response_format=FORMAT)
    assert embedded.generate(messages=MESSAGES, max_tokens=3, response_format={"type": "text"}).token_ids


def test_formats_are_read_as_the_openai_client_and_pydantic_write_them() -> None:
    class Person:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return SCHEMA

    for form in (FORMAT, {"type": "json_schema", "schema": SCHEMA}, Person):
        assert read_format(form) == ("json_schema", json.dumps(SCHEMA))


def test_without_the_library_the_error_names_the_extra(
    embedded: SpecStackGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spec_stack.hf.structured.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[structured\]'"):
        embedded.stream(messages=MESSAGES, response_format=FORMAT)


@pytest.mark.parametrize("behind", ['\n  | "b"', ' # the first\n  | "b"', '\n\n| "b"'])
def test_alternatives_of_a_grammar_may_begin_a_line(embedded: SpecStackGenerator, behind: str) -> None:
    wanted = {"type": "grammar", "grammar": f'root ::= "a"{behind}'}
    answer = embedded.generate("Say: ", max_tokens=8, response_format=wanted)
    assert answer.text in ("a", "b")
