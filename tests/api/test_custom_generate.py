"""`model.generate(custom_generate=with_draft(...))` against `model.generate` without it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TextStreamer,
    TopPLogitsWarper,
    WatermarkingConfig,
)

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator, with_draft
from spec_stack.api.custom_generate import forget
from spec_stack.hf.loading import ASSETS
from spec_stack.hf.versions import CACHE_NAMES
from tests.support.models import VOCAB, make_model, random_prompt
from tests.support.nightly import others_nightly

PROMPT = "def read_lines(path):\n"


def padded(*prompts: list[int]) -> dict[str, Any]:
    """Prompts on the left of which zeros fill up 20 tokens."""
    rows = [[0] * (20 - len(prompt)) + prompt for prompt in prompts]
    masks = [[0] * (20 - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks), "pad_token_id": 0}


def ids_of(length: int = 20, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.tensor([random_prompt(length, seed)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture
def plain() -> PreTrainedModel:
    """The target of the tests as it was before its attention was replaced."""
    return make_model(seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("gamma", others_nightly([None, 0, 4], usual=[None, 0]))
def test_greedy_sequences_are_those_of_plain_generate(
    plain: PreTrainedModel, target: PreTrainedModel, draft: PreTrainedModel, gamma: int | None
) -> None:
    for seed in range(4):
        inputs = ids_of(seed=seed)
        expected = plain.generate(**inputs, max_new_tokens=40, do_sample=False)
        ours = target.generate(
            **inputs, max_new_tokens=40, do_sample=False, custom_generate=with_draft(draft, gamma=gamma)
        )
        assert torch.equal(ours, expected)
        assert ours.dtype == expected.dtype


def test_a_batch_with_left_padding_gives_the_rows_of_plain_generate(
    plain: PreTrainedModel, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    prompts = padded(*(random_prompt(length, seed=length) for length in (5, 12, 12, 20)))
    options = {**prompts, "max_new_tokens": 24, "do_sample": False}
    expected = plain.generate(**options)
    assert torch.equal(target.generate(**options, custom_generate=with_draft(draft)), expected)
    # An end token that some rows meet and others do not: the shorter ones are filled up.
    options["eos_token_id"] = end = int(expected[1, 20 + 5])
    ended = plain.generate(**options)
    assert torch.equal(target.generate(**options, custom_generate=with_draft(draft)), ended)
    lengths = {(row == end).nonzero()[0].item() if bool((row[20:] == end).any()) else -1 for row in ended}
    assert len(lengths) > 1


def test_the_models_own_end_token_ends_a_row_and_its_metrics_come_back(
    plain: PreTrainedModel, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    options = {**ids_of(), "max_new_tokens": 30, "do_sample": False}
    end = int(plain.generate(**options)[0, 20 + 6])
    for model in (plain, target):
        model.generation_config.eos_token_id = end
    expected = plain.generate(**options)
    ours = target.generate(**options, return_dict_in_generate=True, custom_generate=with_draft(draft, gamma=4))
    assert torch.equal(ours.sequences, expected)
    assert expected.shape[1] < 50
    assert ours.metrics[0].num_tokens == expected.shape[1] - 20
    assert ours["sequences"] is ours[0]


class AfterToken(StoppingCriteria):
    """Holds once a token has been seen so many times behind the prompt; remembers the lengths it was asked about."""

    def __init__(self, token_id: int, start: int) -> None:
        self.token_id, self.start, self.lengths = token_id, start, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return (input_ids[:, self.start :] == self.token_id).any(dim=1)


def test_criteria_are_asked_after_every_token_and_end_a_row_inside_an_accepted_run(
    plain: PreTrainedModel, target: PreTrainedModel
) -> None:
    inputs = ids_of()
    stop_at = int(plain.generate(**inputs, max_new_tokens=12, do_sample=False)[0, 20 + 7])
    criteria = [AfterToken(stop_at, 20) for _ in range(2)]
    options = {**inputs, "max_new_tokens": 30, "do_sample": False}
    expected = plain.generate(**options, stopping_criteria=StoppingCriteriaList([criteria[0]]))
    # The target as its own draft: every proposal is accepted whole.
    ours = target.generate(
        **options,
        stopping_criteria=StoppingCriteriaList([criteria[1]]),
        return_dict_in_generate=True,
        custom_generate=with_draft(make_model(seed=1), gamma=8),
    )
    assert torch.equal(ours.sequences, expected)
    assert criteria[1].lengths == criteria[0].lengths == list(range(21, expected.shape[1] + 1))
    assert ours.metrics == [None]


@pytest.mark.slow
def test_sampling_is_reproducible_by_torchs_seed_and_stays_within_top_k(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    inputs = ids_of()
    options = {**inputs, "max_new_tokens": 20, "do_sample": True, "temperature": 0.8, "top_k": 3, "top_p": 0.95}
    custom = with_draft(draft, gamma=3)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(target.generate(**options, custom_generate=custom))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    torch.manual_seed(0)
    two = target.generate(**options, num_return_sequences=2, custom_generate=custom)
    assert two.shape == (2, 40)
    assert not torch.equal(two[0], two[1])
    logits = target(two).logits
    for position in range(20, 40):
        assert int(two[0, position]) in logits[0, position - 1].topk(3).indices.tolist()


@pytest.mark.slow
def test_sampled_first_tokens_have_the_models_distribution(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    inputs, num = ids_of(8), 400
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 1.5, "top_k": 4, "num_return_sequences": num}
    rows = target.generate(**inputs, **options, max_new_tokens=1, custom_generate=with_draft(draft))
    counts = torch.bincount(rows[:, -1], minlength=VOCAB).float()
    logits = target(inputs["input_ids"]).logits[0, -1] / 1.5
    best = logits.topk(4)
    expected = torch.zeros(VOCAB).scatter(0, best.indices, best.values.softmax(0)) * num
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    # Chi-square with three degrees of freedom: over 16.3 once in a thousand.
    assert float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()) < 16.3


@pytest.mark.parametrize(
    "options",
    others_nightly(
        [
            {"repetition_penalty": 1.7},
            {"min_new_tokens": 12, "eos_token_id": list(range(2, 40))},
            {"no_repeat_ngram_size": 2},
            {"bad_words_ids": [[5], [7, 9]]},
            {"repetition_penalty": 1.3, "suppress_tokens": [3, 4, 5, 6]},
        ],
        usual=[
            {"repetition_penalty": 1.3, "suppress_tokens": [3, 4, 5, 6]},
            {"min_new_tokens": 12, "eos_token_id": list(range(2, 40))},
        ],
    ),
    ids=str,
)
def test_a_generation_configs_processors_apply_as_in_plain_generate(
    plain: PreTrainedModel, target: PreTrainedModel, draft: PreTrainedModel, options: dict[str, Any]
) -> None:
    prompts = padded(*(random_prompt(length, seed=length) for length in (9, 20)))
    options = {**prompts, "max_new_tokens": 30, "do_sample": False, **options}
    ours = target.generate(**options, custom_generate=with_draft(draft, gamma=3))
    assert torch.equal(ours, plain.generate(**options))


class Counting(LogitsProcessor):
    """Forbids a fifth of the vocabulary, another one at every call."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        scores[:, self.num_calls % 5 :: 5] = -torch.inf
        return scores


class AfterCalls(StoppingCriteria):
    """Ends the rows after seven calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.num_calls += 1
        return torch.full((len(input_ids),), self.num_calls > 6)


def allowed(batch_id: int, input_ids: torch.Tensor) -> list[int]:
    """Tokens of the last one's ten, and of the first ones at the beginning of the answer."""
    last = 0 if len(input_ids) == 20 else int(input_ids[-1])
    return list(range(last // 10 * 10 + 2, last // 10 * 10 + 10))


STATEFUL: dict[str, Callable[[], dict[str, Any]]] = {
    "prefix function": lambda: {"prefix_allowed_tokens_fn": allowed},
    "counting": lambda: {"logits_processor": LogitsProcessorList([Counting()])},
    "counting, repetition penalty": lambda: {
        "logits_processor": LogitsProcessorList([Counting()]),
        "repetition_penalty": 1.6,
    },
    "encoder repetition penalty": lambda: {"encoder_repetition_penalty": 0.5},
    "encoder no repeat n-gram": lambda: {"encoder_no_repeat_ngram_size": 1},
    "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([AfterCalls()])},
    "watermark": lambda: {"watermarking_config": WatermarkingConfig(bias=2.0)},
}


@pytest.mark.parametrize("length", [pytest.param(20, marks=pytest.mark.nightly), 9])
@pytest.mark.parametrize(
    "kind", others_nightly(STATEFUL, usual=["prefix function", "counting", "encoder repetition penalty", "criterion"])
)
def test_processors_and_criteria_see_one_row_as_in_plain_generate(
    plain: PreTrainedModel, target: PreTrainedModel, kind: str, length: int
) -> None:
    # Where there is no end token, plain generation goes on with a row that has ended.
    options = {"eos_token_id": 1, "max_new_tokens": 24, "do_sample": False}
    inputs = padded(random_prompt(length, seed=length)) | options
    expected = plain.generate(**inputs, **STATEFUL[kind]())
    assert not torch.equal(expected, plain.generate(**inputs))
    # The target as its own draft: most of what is proposed is accepted.
    custom = with_draft(make_model(seed=1), gamma=3)
    ours = target.generate(**inputs, **STATEFUL[kind](), custom_generate=custom, return_dict_in_generate=True)
    assert torch.equal(ours.sequences, expected)


def test_guidance_holds(plain: PreTrainedModel, target: PreTrainedModel, draft: PreTrainedModel) -> None:
    options = {**ids_of(), "max_new_tokens": 24, "do_sample": False, "guidance_scale": 1.5}
    custom = with_draft(draft, gamma=3)
    ours = target.generate(**options, custom_generate=custom, return_dict_in_generate=True)
    assert torch.equal(ours.sequences, plain.generate(**options))
    assert "may keep state" in ours.metrics[0].decode_reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits_processor": [Counting()]}, "cannot share Counting"),
        ({"prefix_allowed_tokens_fn": allowed}, "cannot share PrefixConstrainedLogitsProcessor"),
        ({"stopping_criteria": [AfterCalls()], "no_repeat_ngram_size": 2}, "cannot share AfterCalls,"),
        ({"guidance_scale": 1.5}, "cannot share UnbatchedClassifierFreeGuidance"),
    ],
)
def test_several_rows_share_no_state(
    target: PreTrainedModel, draft: PreTrainedModel, options: dict[str, Any], message: str
) -> None:
    ids = torch.tensor([random_prompt(6), random_prompt(6, 1)])
    with pytest.raises(ValueError, match=message):
        target.generate(ids, max_new_tokens=4, do_sample=False, custom_generate=with_draft(draft), **options)


def test_several_rows_share_what_says_that_it_keeps_nothing(
    plain: PreTrainedModel, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    def only_even(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(1, scores.shape[1], 2), -torch.inf)

    only_even.stateless = True  # type: ignore[attr-defined]
    ids = torch.tensor([random_prompt(6), random_prompt(6, 1)])
    options = {"max_new_tokens": 12, "do_sample": False, "logits_processor": [only_even]}
    expected = plain.generate(ids, **options)
    assert torch.equal(target.generate(ids, custom_generate=with_draft(draft), **options), expected)


@pytest.mark.parametrize(
    "warpers",
    [
        [TopPLogitsWarper(0.3), TemperatureLogitsWarper(5.0)],
        pytest.param([TopPLogitsWarper(0.01)], marks=pytest.mark.nightly),
    ],
)
def test_warpers_of_the_caller_go_in_the_order_of_plain_generate(
    target: PreTrainedModel, draft: PreTrainedModel, warpers: list[Any]
) -> None:
    """Before the configuration's own temperature, which flattens the row."""
    options = {**ids_of(), "max_new_tokens": 8, "do_sample": True, "temperature": 20.0, "top_k": 0}
    rows = target.generate(
        **options, logits_processor=warpers, num_return_sequences=20, custom_generate=with_draft(draft)
    )
    for row in rows:
        logits = target(row[None, :-1]).logits[0, 19:].detach()
        kept = TopPLogitsWarper(warpers[0].top_p)(row[None], logits)
        assert all(float(scores[token_id]) > -torch.inf for scores, token_id in zip(kept, row[20:], strict=True))


def test_a_streamer_that_transformers_keeps_to_itself_is_refused_and_its_reader_set_free(
    embedded: SpecStackGenerator,
) -> None:
    streamer = TextIteratorStreamer(embedded.tokenizer, skip_prompt=True, timeout=5)
    inputs = embedded.tokenizer(PROMPT, return_tensors="pt")
    with pytest.raises(ValueError, match="give it as spec_streamer="):
        embedded.target.generate(
            **inputs, max_new_tokens=4, custom_generate=with_draft(embedded.draft), streamer=streamer
        )
    assert "".join(streamer) == ""


def test_a_streamer_under_its_own_name_is_put_prompt_and_text(
    embedded: SpecStackGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer, custom = embedded.target, embedded.tokenizer, with_draft(embedded.draft)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    options = {**inputs, "max_new_tokens": 24, "do_sample": False}
    expected = tokenizer.decode(model.generate(**options)[0], skip_special_tokens=True)
    model.generate(**options, custom_generate=custom, spec_streamer=TextStreamer(tokenizer, skip_special_tokens=True))
    assert capsys.readouterr().out == expected + "\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    call = {**options, "custom_generate": custom, "spec_streamer": streamer}
    thread = threading.Thread(target=model.generate, kwargs=call)
    thread.start()
    assert "".join(streamer) == expected.removeprefix(PROMPT)
    thread.join()


def test_a_long_prompt_is_pruned_and_the_metrics_say_so(embedded: SpecStackGenerator) -> None:
    inputs = embedded.tokenizer("x = 1\n" * 400, return_tensors="pt")
    config = SpecStackConfig(PrefillConfig(min_prompt_tokens=512, on_scoring_failure="raise"))
    custom = with_draft(embedded.draft, keep_rate=0.3, config=config)
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    outputs = embedded.target.generate(**inputs, **options, custom_generate=custom)
    (metrics,) = outputs.metrics
    assert metrics.sparse_prefill
    assert metrics.num_kept_tokens < 0.5 * metrics.num_prompt_tokens
    expected = SpecStackGenerator(embedded.target, embedded.draft, config=config).generate(
        input_ids=inputs.input_ids, max_tokens=8, keep_rate=0.3
    )
    assert outputs.sequences[0, -8:].tolist() == expected.token_ids


def test_a_draft_by_name_is_loaded_once_and_forgotten_on_demand(embedded: SpecStackGenerator) -> None:
    forget()
    inputs = embedded.tokenizer(PROMPT, return_tensors="pt")
    first, second = (with_draft(ASSETS / "draft") for _ in range(2))
    generator = first.generator(embedded.target)
    assert second.generator(embedded.target) is generator
    assert generator.draft.dtype == embedded.target.dtype
    expected = embedded.target.generate(**inputs, max_new_tokens=8, do_sample=False)
    ours = embedded.target.generate(**inputs, max_new_tokens=8, do_sample=False, custom_generate=second)
    assert torch.equal(ours, expected)
    forget()
    assert second.generator(embedded.target) is not generator


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 3}, "cannot do 'beam_search'"),
        ({"prompt_lookup_num_tokens": 3}, "cannot do 'assisted_generation'"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"position_ids": torch.arange(3, 23)[None]}, "leave position_ids out"),
        ({"max_new_tokens": 5000}, "positions"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    target: PreTrainedModel, draft: PreTrainedModel, options: dict[str, Any], message: str
) -> None:
    call = {**ids_of(), "max_new_tokens": 4, "do_sample": False, "custom_generate": with_draft(draft)} | options
    with pytest.raises(ValueError, match=message):
        target.generate(**call)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_that_is_handed_in_is_refused_under_either_name(
    target: PreTrainedModel, draft: PreTrainedModel, name: str
) -> None:
    # Before 5.24 transformers itself refuses the name that it does not have yet.
    with pytest.raises(ValueError, match=r"leave \w+ out; .*session\(\)|not used by the model: \['cache'\]"):
        target.generate(**ids_of(), max_new_tokens=4, custom_generate=with_draft(draft), **{name: DynamicCache()})


def test_right_padding_and_a_streamer_for_a_batch_are_refused(
    target: PreTrainedModel, draft: PreTrainedModel, embedded: SpecStackGenerator
) -> None:
    custom, ids = with_draft(draft), torch.tensor([random_prompt(6), random_prompt(6, 1)])
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    with pytest.raises(ValueError, match="padded on the right"):
        target.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2, custom_generate=custom)
    streamer = TextStreamer(embedded.tokenizer)
    with pytest.raises(ValueError, match="takes one row"):
        target.generate(input_ids=ids, max_new_tokens=2, custom_generate=custom, spec_streamer=streamer)
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        target.generate(**ids_of(), max_new_tokens=2, custom_generate=with_draft("./nowhere"))


def test_a_gamma_with_another_policy_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="give gamma or another policy, not both"):
        with_draft("draft", gamma=3, policy="ema")
    with_draft("draft", gamma=3, policy="fixed")


@pytest.mark.parametrize("draft", [5, None, ["a"], {}, object()])
def test_a_draft_or_configuration_that_is_none_is_refused_at_once(draft: Any) -> None:
    with pytest.raises(TypeError, match="a folder, a hub id or a loaded transformers model"):
        with_draft(draft)
    wrong: Any = PrefillConfig() if draft is None else draft
    with pytest.raises(TypeError, match="must be a SpecStackConfig"):
        with_draft("draft", config=wrong)


@pytest.mark.parametrize(
    "wrong", [{"keep_rate": 7}, {"sparse_prefill": "perhaps"}, {"policy": "throughputt"}, {"gamma": -1}, {"gamma": 2.0}]
)
def test_an_option_that_no_call_takes_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        with_draft("draft", **wrong)
