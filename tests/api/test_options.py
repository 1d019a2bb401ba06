"""The options of a call: spelled out, checked once, and the nearest one named for a name that is none."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig, PreTrainedModel

from spec_stack import SamplingParams, SpecStackGenerator, with_draft
from spec_stack.api.unknown_options import ALIASES
from spec_stack.config import DecodeConfig, LoadConfig, PrefillConfig
from spec_stack.settings.options import meaning
from tests.support.models import random_prompt

CALLS = [SpecStackGenerator.generate, SpecStackGenerator.stream, SpecStackGenerator.from_pretrained]


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_every_option_is_in_the_signature_and_in_a_docstring(function: Any) -> None:
    signature = inspect.signature(function)
    assert not any(parameter.kind == parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    if function is SpecStackGenerator.stream:
        assert set(signature.parameters) < set(inspect.signature(SpecStackGenerator.generate).parameters)
        return
    sections = re.split(r"\n *(\w+)\n *-+\n", inspect.getdoc(function) or "")
    documented = sections[sections.index("Parameters") + 1]
    names = {
        name.strip() for line in re.findall(r"^(\w[\w, ]*?)(?: : .*)?$", documented, re.M) for name in line.split(",")
    }
    assert names == set(signature.parameters) - {"self"}
    assert {"Returns", "Raises"} <= set(sections)


def test_sampling_options_have_the_defaults_of_their_dataclass() -> None:
    for function in CALLS[:2]:
        for name, parameter in inspect.signature(function).parameters.items():
            if name in SamplingParams.__dataclass_fields__ and name != "stop":
                assert parameter.default == getattr(SamplingParams, name), name


@pytest.mark.parametrize("config", [PrefillConfig, LoadConfig, DecodeConfig, SamplingParams])
def test_every_field_of_a_configuration_has_a_meaning_that_its_help_shows(config: type) -> None:
    for name in set(config.__dataclass_fields__) - {"given", "calibrated_by"}:  # type: ignore[attr-defined]
        assert meaning(config, name) in (config.__doc__ or "")


def test_params_stand_for_the_single_options(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    generator = SpecStackGenerator(target, draft)
    single = {"max_tokens": 9, "temperature": 0.8, "seed": 5, "top_k": 20}
    prompt = random_prompt(20)
    expected = generator.generate(input_ids=prompt, gamma=2, **single).token_ids  # type: ignore[arg-type]
    params = SamplingParams(**single)  # type: ignore[arg-type]
    assert generator.generate(input_ids=prompt, gamma=2, params=params).token_ids == expected
    streamed = generator.stream(input_ids=prompt, gamma=2, params=params)
    assert [token_id for output in streamed for token_id in output.token_ids] == expected


def test_params_beside_single_options_are_refused(embedded: SpecStackGenerator) -> None:
    with pytest.raises(ValueError, match="not both"):
        embedded.generate("x", params=SamplingParams(max_tokens=3), temperature=1.0)
    wrong: Any = {"max_tokens": 3}
    with pytest.raises(ValueError, match="must be a SamplingParams, got dict"):
        embedded.generate("x", params=wrong)


def test_numbers_of_numpy_are_as_good_as_pythons(embedded: SpecStackGenerator) -> None:
    result = embedded.generate(
        input_ids=np.array([5, 6, 7]),
        max_tokens=np.int64(4),
        gamma=np.int32(2),
        top_k=np.int16(3),
        temperature=np.float32(0.5),
        seed=np.uint8(7),
        keep_rate=np.float32(1.0),
        stop_token_ids=[np.int64(9)],
        logit_bias={np.int64(4): np.float32(0.5)},
        logprobs=np.int64(1),
    )
    assert len(result.token_ids) <= 4
    json.dumps(result.metrics.as_dict())


def test_the_largest_bias_and_penalty_are_sampled_at_the_lowest_temperature(embedded: SpecStackGenerator) -> None:
    shaping: dict[str, Any] = {"logit_bias": {5: 1e15, 6: 1e15, 7: -math.inf}, "repetition_penalty": 1e-15}
    result = embedded.generate(input_ids=[5, 6, 7], max_tokens=4, temperature=0.001, seed=1, **shaping)
    assert set(result.token_ids) <= {5, 6}


@pytest.mark.parametrize("name", ["max_new_tokens", "do_sample", "typical_p", "prune", "inputs", "keeprate"])
def test_an_option_of_another_name_is_refused_by_naming_the_option(embedded: SpecStackGenerator, name: str) -> None:
    options: dict[str, Any] = {name: None}
    nearest = ALIASES.get(name, "keep_rate")
    for call in (embedded.generate, embedded.stream, embedded.session().generate, embedded.agenerate):
        expected = rf"{call.__name__}\(\) has no option '{name}'; did you mean {nearest}=\?"
        with pytest.raises(TypeError, match=expected):
            asyncio.run(call("x", **options)) if call == embedded.agenerate else call("x", **options)


@pytest.mark.parametrize(
    ("call", "option", "said"),
    [
        ("generate", "assistant_model", "; the draft is given once, to SpecStackGenerator"),
        ("generate", "stopping_criteria", "; .*closing a stream"),
        ("generate", "num_beams", "; .*n= samples several"),
        ("generate", "past_key_values", "; .*session"),
        ("generate", "zzz", "; it has prompt, messages"),
        ("generate", "top_n_tokens", r"; did you mean logprobs=\?"),
        ("stream", "guidance_scale", ", which is Transformers' and has no counterpart here; leave it out$"),
        *(("stream", option, r": generate\(\)") for option in ("streamer", "n", "records", "return_records")),
        ("from_pretrained", "load_in_4bit", r"; did you mean precision=\?"),
        ("from_pretrained", "torch_dtype", r"; did you mean precision=\?"),
        ("from_pretrained", "pretrained_model_name_or_path", r"; did you mean target=\?"),
    ],
)
def test_what_does_the_same_elsewhere_is_named(embedded: SpecStackGenerator, call: str, option: str, said: str) -> None:
    with pytest.raises(TypeError, match=rf"{call}\(\) has no option '{option}'{said}"):
        getattr(embedded, call)(**{option: 2})


def test_no_option_of_transformers_is_answered_with_a_list_of_all(embedded: SpecStackGenerator) -> None:
    known = inspect.signature(SpecStackGenerator.generate).parameters
    for name in vars(GenerationConfig()).keys() - known:
        with pytest.raises(TypeError, match="has no option") as refused:
            embedded.generate("x", **{name: 1})
        assert ("did you mean" in str(refused.value)) == (name in ALIASES and name != "assistant_model"), name
        assert len(str(refused.value)) < 200


def test_a_former_field_is_refused() -> None:
    for make in (PrefillConfig, partial(with_draft, "draft")):
        with pytest.raises(TypeError, match="prune"):
            make(prune="both")  # type: ignore[call-arg, operator]


def test_no_alias_is_an_option_or_stands_for_one_that_is_none() -> None:
    functions = (SpecStackGenerator.generate, SpecStackGenerator.from_pretrained)
    known = {name for function in functions for name in inspect.signature(function).parameters}
    assert not set(ALIASES) & known
    assert set(ALIASES.values()) <= known
