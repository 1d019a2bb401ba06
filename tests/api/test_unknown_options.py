"""Options that people bring from `model.generate` and other servers: the error names the way."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList
from transformers.generation import logits_process

from spec_stack import PrefillConfig, SpecStackGenerator, with_draft
from spec_stack.api.unknown_options import ALIASES, PROCESSORS, WAYS

PROMPT = "def read_lines(path):\n"
# Options of `model.generate` and of other servers, with a value each.
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 4,
    "max_length": 4,
    "do_sample": False,
    "generation_config": GenerationConfig(),
    "stopping_criteria": StoppingCriteriaList(),
    "stop_strings": ["a"],
    "num_beams": 2,
    "assistant_model": None,
    "cache": None,
    "past_key_values": None,
    "use_cache": True,
    "position_ids": None,
    "max_time": 1.0,
    "tokenizer": None,
    "custom_generate": None,
    "prompt_lookup_num_tokens": 3,
    "num_assistant_tokens": 4,
    "typical_p": 0.9,
    "output_attentions": True,
    "output_hidden_states": True,
    "sampling_params": None,
    "num_speculative_tokens": 4,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_another_name_is_refused_with_the_way(embedded: SpecStackGenerator, name: str) -> None:
    with pytest.raises(TypeError, match=rf"generate\(\) has no option '{name}'") as caught:
        embedded.generate(PROMPT, **{name: OPTIONS[name]})
    told = str(caught.value)
    assert name in WAYS or "did you mean" in told
    assert "; it has " not in told


def test_every_option_of_transformers_has_an_answer_that_was_thought_of() -> None:
    # Not one by the likeness of two names, which would send `force_words_ids` to `bad_words_ids`.
    theirs = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    theirs |= set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    known = set(inspect.signature(SpecStackGenerator.generate).parameters)
    assert len(theirs) > 60
    assert not theirs - known - set(ALIASES) - set(WAYS)


def test_a_processor_that_a_hint_names_is_transformers_own() -> None:
    assert all(hasattr(logits_process, name) for name in PROCESSORS.values())


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("load_in_4bit", 'precision="nf4"'),
        ("attn_implementation", r"SpecStackGenerator\(target, draft, tokenizer\)"),
        ("cache_dir", "set HF_HOME"),
        ("pretrained_model_name_or_path", "did you mean target="),
    ],
)
def test_loading_says_how_what_it_does_not_do_is_done(option: str, told: str) -> None:
    asked: dict[str, Any] = {option: "x"}
    with pytest.raises(TypeError, match=rf"from_pretrained\(\) has no option '{option}'.*{told}"):
        SpecStackGenerator.from_pretrained(**asked)


@pytest.mark.parametrize("option", ["streamer", "n", "records", "return_records"])
def test_a_stream_says_where_the_options_of_a_whole_answer_are(embedded: SpecStackGenerator, option: str) -> None:
    asked: dict[str, Any] = {option: 2}
    with pytest.raises(TypeError, match=rf"stream\(\) has no option '{option}': generate\(\)"):
        embedded.stream(PROMPT, **asked)


@pytest.mark.parametrize("old", ["specprefill", "prune"])
def test_a_former_switch_is_refused_by_naming_the_new_one(embedded: SpecStackGenerator, old: str) -> None:
    asked: dict[str, Any] = {old: None}
    for call in (embedded.generate, embedded.stream, embedded.session().generate):
        with pytest.raises(TypeError, match="it is now sparse_prefill="):
            call(PROMPT, **asked)
    for make in (PrefillConfig, partial(with_draft, embedded.draft)):
        with pytest.raises(TypeError, match="sparse_prefill"):
            make(**asked)


def test_no_hint_names_an_option_that_is_none_or_stands_for_one_that_is_there() -> None:
    functions = (SpecStackGenerator.generate, SpecStackGenerator.from_pretrained)
    known = {name for function in functions for name in inspect.signature(function).parameters}
    assert not set(WAYS) & known
    assert not set(ALIASES) & known
    assert set(ALIASES.values()) <= known
