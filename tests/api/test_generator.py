from __future__ import annotations

import time
import warnings
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from spec_stack import DecodeConfig, Policy, PrefillConfig, SpecStackConfig, SpecStackGenerator, StepContext
from spec_stack.bench.demo import hide_fact
from spec_stack.config import OnScoringError
from spec_stack.controller.base import StepRecord
from spec_stack.controller.pool import PolicyPool
from spec_stack.controller.registry import POLICIES, make_policy
from spec_stack.controller.simple import Fixed
from spec_stack.records import read_records
from tests.support.forwards import failing, forwards_of, positions_of
from tests.support.models import make_model, random_prompt
from tests.support.nightly import others_nightly

CODE = "def read_lines(path):\n    with open(path) as file:\n"

# Without a tokenizer there are no lines.
CHUNKS = PrefillConfig(granularity="chunks", chunk_size=8)
LOOK_AHEAD = replace(CHUNKS, scoring_queries="look_ahead")


def generator_of(target: PreTrainedModel, draft: PreTrainedModel, prefill: PrefillConfig) -> SpecStackGenerator:
    return SpecStackGenerator(target, draft, config=SpecStackConfig(prefill))


def joined(embedded: SpecStackGenerator, **options: Any) -> tuple[list[int], str, str | None]:
    outputs = list(embedded.stream(**options))
    assert all(output.finish_reason is None and output.metrics is None for output in outputs[:-1])
    tokens = [token for output in outputs for token in output.token_ids]
    return tokens, "".join(output.text for output in outputs), outputs[-1].finish_reason


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": CODE, "max_tokens": 40},
        {"prompt": CODE, "max_tokens": 40, "sparse_prefill": "on", "keep_rate": 0.5},
        {"prompt": CODE, "max_tokens": 40, "temperature": 0.8, "seed": 7, "top_k": 50, "top_p": 0.9},
        {"prompt": CODE, "max_tokens": 40, "stop": ["return", "\n\n"]},
        {"messages": [{"role": "user", "content": "Give three tips."}], "max_tokens": 1},
    ],
)
def test_a_joined_stream_equals_generate(embedded: SpecStackGenerator, options: dict[str, Any]) -> None:
    result = embedded.generate(return_records=True, **options)
    assert joined(embedded, **options) == (result.token_ids, result.text, result.finish_reason)
    assert (
        sum(record.num_tokens for record in result.records or []) == len(result.token_ids) == result.metrics.num_tokens
    )


def test_a_policy_learns_from_the_last_step_of_a_stream_that_is_left_at_its_finish_reason(
    embedded: SpecStackGenerator,
) -> None:
    class Counting(Policy):
        num_observed = 0

        def choose(self, context: StepContext) -> int:
            return 2

        def observe(self, record: StepRecord) -> None:
            self.num_observed += 1

    for max_tokens in (1, 20):
        policy, num_steps = Counting(), 0
        for output in embedded.stream(CODE, max_tokens=max_tokens, policy=policy):
            num_steps += 1
            if output.finish_reason is not None:
                break
        assert policy.num_observed == num_steps


def test_the_look_ahead_ends_at_an_end_token(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    options: dict[str, Any] = {"input_ids": random_prompt(100), "sparse_prefill": "on"}
    assert next(generator_of(target, draft, LOOK_AHEAD).stream(**options)).record.gamma == 8
    probe = SpecStackGenerator(draft, draft).generate(input_ids=random_prompt(100), max_tokens=8, gamma=0)
    end = probe.token_ids[3]
    target.generation_config.eos_token_id = end
    record = next(generator_of(target, draft, LOOK_AHEAD).stream(**options)).record
    assert record.gamma == probe.token_ids.index(end) + 1


def test_a_seed_makes_sampling_reproducible_and_is_reported(embedded: SpecStackGenerator) -> None:
    first = embedded.generate(CODE, max_tokens=30, temperature=1.0, policy="fixed")
    again = embedded.generate(CODE, max_tokens=30, temperature=1.0, seed=first.metrics.seed)
    assert again.metrics.policy == first.metrics.policy == "fixed-4"
    other = embedded.generate(CODE, max_tokens=30, temperature=1.0, seed=1)
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids
    assert embedded.generate(CODE, max_tokens=1).metrics.seed is None


@pytest.mark.parametrize("policy", others_nightly(["heuristic", "ema", "confidence"], usual=["ema"]))
def test_a_seed_holds_under_policies_that_learn_but_do_not_watch_the_clock(
    policy: str, embedded: SpecStackGenerator
) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "policy": policy}
    assert embedded.generate(CODE, **options).token_ids == embedded.generate(CODE, **options).token_ids


def test_a_policy_chosen_for_the_generator_is_not_replaced_by_a_seed(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    options: dict[str, Any] = {"input_ids": [5, 6], "max_tokens": 4, "temperature": 1.0, "seed": 1}
    chosen = SpecStackGenerator(target, draft, policy=make_policy("confidence"))
    assert chosen.generate(**options).metrics.policy == "confidence"
    assert SpecStackGenerator(target, draft, policy="throughput").generate(**options).metrics.policy == "fixed-4"


@pytest.mark.parametrize("proposer", ["both", "ngram"])
def test_a_seed_holds_whatever_the_generators_proposer_is(
    proposer: str, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    config = SpecStackConfig(decode=DecodeConfig(proposer=proposer))
    options: dict[str, Any] = {"input_ids": [5, 6, 7] * 8, "max_tokens": 8, "temperature": 1.0}
    seeded = SpecStackGenerator(target, draft, config=config)
    assert seeded.generate(seed=1, **options).metrics.proposer == "model"
    assert seeded.generate(**options).metrics.proposer == proposer
    # What the call names holds.
    assert seeded.generate(seed=1, proposer=proposer, **options).metrics.proposer == proposer
    assert seeded.generate(seed=1, policy="ema", **options).metrics.proposer == proposer


@pytest.mark.parametrize(
    ("length", "options", "on", "reason"),
    [
        (99, {}, False, "shorter than min_prompt_tokens=100"),
        (100, {}, True, "min_prompt_tokens=100 or more"),
        (99, {"sparse_prefill": "on"}, True, 'sparse_prefill="on"'),
        (100, {"sparse_prefill": "off"}, False, "leaves the target dense"),
        (100, {"keep_rate": 1.0}, False, "keep_rate is 1.0"),
    ],
)
def test_the_metrics_say_whether_the_prompt_was_pruned_and_why(
    length: int, options: dict[str, Any], on: bool, reason: str, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    generator = generator_of(target, draft, replace(CHUNKS, min_prompt_tokens=100))
    metrics = generator.generate(input_ids=random_prompt(length), max_tokens=3, **options).metrics
    assert metrics.sparse_prefill is on
    assert reason in metrics.sparse_prefill_reason
    assert metrics.num_scored_tokens == (length if on else 0)
    assert (metrics.num_kept_tokens < length) is on
    assert metrics.as_dict()["keep_rate"] == metrics.num_kept_tokens / length


def test_an_error_while_scoring_is_logged_and_falls_back_to_dense_with_one_warning(
    target: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    draft = make_model(seed=1)
    generator = generator_of(target, draft, LOOK_AHEAD)
    options: dict[str, Any] = {"input_ids": random_prompt(100), "max_tokens": 10, "sparse_prefill": "on", "gamma": 4}
    dense = generator.generate(**options | {"sparse_prefill": "off"})
    failure = RuntimeError("out of memory")
    with failing(draft.model.layers[1], 2, failure), pytest.warns(UserWarning, match="out of memory"):
        result = generator.generate(**options)
    assert result.token_ids == dense.token_ids
    # From a fresh draft, which is the target: all is accepted.
    assert result.metrics.acceptance_rate == 1.0
    assert not result.metrics.sparse_prefill
    assert result.metrics.num_scored_tokens == 0
    assert "scoring failed, prefilled densely: RuntimeError: out of memory" in result.metrics.sparse_prefill_reason
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "RuntimeError: out of memory" in caplog.text
    assert "in gather_inputs" in caplog.text
    with failing(draft, 0, failure), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generator.generate(**options).token_ids == dense.token_ids
    assert generator.generate(**options).metrics.sparse_prefill


@pytest.mark.parametrize(
    ("on_failure", "error"), [("raise", RuntimeError("out of memory")), ("dense", KeyboardInterrupt("stopped"))]
)
def test_an_error_while_scoring_is_raised_on_request_and_an_interrupt_always(
    on_failure: OnScoringError, error: BaseException, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    generator = generator_of(target, draft, replace(CHUNKS, on_scoring_failure=on_failure))
    options: dict[str, Any] = {"input_ids": random_prompt(100), "sparse_prefill": "on", "max_tokens": 4}
    with failing(draft, 0, error), pytest.raises(type(error), match=str(error)):
        generator.generate(**options)
    assert generator.generate(**options).metrics.sparse_prefill


def test_an_error_after_the_first_token_is_raised_and_leaves_the_generator_usable(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    generator = SpecStackGenerator(target, draft)
    prompt = random_prompt(40)
    expected = generator.generate(input_ids=prompt, max_tokens=20)
    for error in (RuntimeError, KeyboardInterrupt):
        with failing(target, 6, error("stopped")), pytest.raises(error, match="stopped"):
            list(generator.stream(input_ids=prompt, max_tokens=20, gamma=1))
        assert generator.generate(input_ids=prompt, max_tokens=20).token_ids == expected.token_ids


def test_streams_stopped_early_or_run_side_by_side_do_not_disturb_each_other(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    generator = generator_of(target, draft, replace(CHUNKS, min_prompt_tokens=64))
    prompts = [random_prompt(length, seed=length) for length in (30, 80)]
    alone = [generator.generate(input_ids=prompt, max_tokens=25).token_ids for prompt in prompts]
    abandoned = generator.stream(input_ids=prompts[1], max_tokens=25)
    next(abandoned)
    streams = [generator.stream(input_ids=prompt, max_tokens=25) for prompt in prompts]
    together: list[list[int]] = [[], []]
    live = [0, 1]
    while live:
        for index in list(live):
            output = next(streams[index], None)
            if output is None:
                live.remove(index)
            else:
                together[index] += output.token_ids
    assert together == alone


def test_the_system_message_and_the_templates_own_tokens_stay_dense(embedded: SpecStackGenerator) -> None:
    fact = hide_fact(embedded.tokenizer, 2500, seed=0)
    system = "You answer from the document only. " * 8
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": fact.document},
        {"role": "assistant", "content": "I have read it."},
        {"role": "user", "content": fact.question},
    ]
    tokenizer = embedded.tokenizer
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(rendered, add_special_tokens=False).input_ids
    with forwards_of(embedded.target) as fed:
        metrics = embedded.generate(messages=messages, max_tokens=1, sparse_prefill="on", keep_rate=0.05).metrics
    seen = set(positions_of(fed))
    assert metrics.sparse_prefill
    special = [at for at, token in enumerate(prompt) if token in tokenizer.all_special_ids]
    assert len(special) == 10
    assert set(special) <= seen
    num_system = len(tokenizer(system, add_special_tokens=False).input_ids)
    assert set(range(2, num_system)) <= seen
    assert metrics.keep_rate < 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one"),
        ({"prompt": "a", "input_ids": [1]}, "exactly one"),
        ({"prompt": ""}, "empty"),
        ({"input_ids": []}, "empty"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user"}]}, "'content'"),
        ({"input_ids": [5000]}, "vocabulary"),
        ({"input_ids": [[1, 2], [3, 4]]}, "one sequence"),
        ({"input_ids": torch.tensor([0.5])}, "one sequence"),
        ({"prompt": "a", "max_tokens": 16384}, "positions"),
        ({"prompt": "a", "policy": make_policy("fixed", gamma=1), "gamma": 2}, "not both"),
        ({"prompt": ["a", "b"]}, "one string"),
        ({"messages": {"role": "user", "content": "hi"}}, "must be a list"),
        ({"input_ids": {"input_ids": [1]}}, "give its 'input_ids'"),
        ({"prompt": "a", "policy": type(make_policy("fixed"))}, "a class Mine"),
    ],
)
def test_a_mistake_is_refused_at_the_call_with_what_to_change(
    embedded: SpecStackGenerator, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        embedded.stream(**options)


def test_a_configuration_of_the_wrong_kind_is_refused(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="SpecStackConfig"):
        SpecStackGenerator(target, draft, config=PrefillConfig())
    with pytest.raises(ValueError, match="unknown policy"):
        SpecStackGenerator.from_pretrained(config=SpecStackConfig(decode=DecodeConfig("clever")))


def test_names_in_place_of_loaded_models_are_refused(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    wrong: Any = "owner/name"
    for models in ((wrong, wrong), (target, wrong), (wrong, draft), (target, None)):
        with pytest.raises(ValueError, match=r"must be a loaded transformers model, got .*from_pretrained\(\) loads"):
            SpecStackGenerator(*models)
    for tokenizers in ({"tokenizer": wrong}, {"tokenizer": 5}, {"draft_tokenizer": wrong}):
        with pytest.raises(ValueError, match="tokenizer must be a loaded tokenizer of transformers or None, got"):
            SpecStackGenerator(target, draft, **tokenizers)


def test_without_a_tokenizer_text_is_refused(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    generator = SpecStackGenerator(target, draft)
    with pytest.raises(ValueError, match="input_ids"):
        generator.stream("hello")
    with pytest.raises(ValueError, match="stop strings"):
        generator.stream(input_ids=[3], stop="x")
    assert generator.generate(input_ids=torch.tensor([[3, 4]]), max_tokens=2).text == ""


def test_a_pair_is_loaded_without_a_policy_made_to_be_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    num_made = 0

    class Counted(Fixed):
        def __post_init__(self) -> None:
            nonlocal num_made
            num_made += 1

    monkeypatch.setitem(POLICIES, "counted", Counted)
    SpecStackGenerator.from_pretrained(device="cpu", policy="counted", calibration=False).generate("a", max_tokens=2)
    assert num_made == 1


def test_the_policy_of_the_constructor_is_the_default(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    by_config = SpecStackGenerator(target, draft, config=SpecStackConfig(decode=DecodeConfig("fixed", gamma=2)))
    assert set(by_config.generate(input_ids=[5, 6], max_tokens=12).metrics.gamma_trace[:3]) == {0, 2}
    by_object = SpecStackGenerator(target, draft, policy=make_policy("fixed", gamma=3))
    assert set(by_object.generate(input_ids=[5, 6], max_tokens=12).metrics.gamma_trace[:3]) == {0, 3}
    assert SpecStackGenerator(target, draft).generate(input_ids=[5], max_tokens=2).metrics.policy == "throughput"
    with pytest.raises(ValueError, match="unknown policy"):
        SpecStackGenerator(target, draft, policy="clever")


def test_a_policy_by_name_keeps_what_it_learned_and_is_never_shared(target: PreTrainedModel) -> None:
    pool = PolicyPool("throughput")
    heuristic, fixed = pool.choose("heuristic"), pool.choose(gamma=2)
    with heuristic.lend() as first, heuristic.lend() as second:
        assert first is not second
    with heuristic.lend() as again, fixed.lend() as other:
        assert again is second or again is first
        assert other.name == "fixed-2"
    generator = SpecStackGenerator(target, make_model(seed=1), policy="heuristic")
    traces = [generator.generate(input_ids=[5, 6], max_tokens=20).metrics.gamma_trace for _ in range(2)]
    assert traces[0][1] == 5
    assert traces[1][1] > 5


@pytest.mark.parametrize(
    ("policy", "pruned"),
    others_nightly(product(POLICIES, (False, True)), usual=list(zip(POLICIES, cycle((True, False)), strict=False))),
)
def test_every_policy_is_lossless_live(
    policy: str, pruned: bool, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    switch = "on" if pruned else "off"
    options: dict[str, Any] = {"input_ids": random_prompt(100), "max_tokens": 36, "sparse_prefill": switch}
    for helper in (draft, make_model(seed=1)):
        generator = generator_of(target, helper, CHUNKS)
        plain = generator.generate(gamma=0, **options)
        for _ in range(2):
            assert generator.generate(policy=policy, **options).token_ids == plain.token_ids


def test_records_are_added_to_a_file(embedded: SpecStackGenerator, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    options: dict[str, Any] = {"max_tokens": 20, "task": "code", "records": path, "return_records": True}
    results = [embedded.generate(CODE, gamma=gamma, **options) for gamma in (2, 4)]
    assert read_records(path) == [record for result in results for record in result.records or []]
    with pytest.raises(ValueError, match=r"give a \.jsonl file"):
        embedded.generate(CODE, records=tmp_path / "steps.txt")


def test_scoring_is_not_begun_where_nothing_could_be_pruned(embedded: SpecStackGenerator) -> None:
    long_system = [{"role": "system", "content": CODE * 100}, {"role": "user", "content": "What does it do?"}]
    for request in ({"prompt": "hello"}, {"messages": long_system}):
        metrics = embedded.generate(sparse_prefill="on", max_tokens=1, **request).metrics
        assert not metrics.sparse_prefill
        assert metrics.num_scored_tokens == 0
        assert "could be pruned" in metrics.sparse_prefill_reason


def test_the_look_ahead_stays_within_the_models_positions() -> None:
    target, draft = make_model(seed=1), make_model(seed=2)
    for model in (target, draft):
        model.config.max_position_embeddings = 203
    generator = generator_of(target, draft, LOOK_AHEAD)
    first = next(generator.stream(input_ids=random_prompt(200), max_tokens=2, sparse_prefill="on"))
    assert first.record.gamma == 3


def test_the_limit_is_the_targets_and_inclusive(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    target.config.max_position_embeddings = 64
    generator = SpecStackGenerator(target, draft)
    assert len(generator.generate(input_ids=random_prompt(60), max_tokens=4).token_ids) == 4
    with pytest.raises(ValueError, match="64 positions"):
        generator.stream(input_ids=random_prompt(60), max_tokens=5)


def test_a_fallback_starts_from_a_fresh_draft(target: PreTrainedModel) -> None:
    twin = make_model(seed=1)
    generator = SpecStackGenerator(
        target,
        twin,
        config=SpecStackConfig(PrefillConfig(granularity="chunks", chunk_size=8, scoring_queries="look_ahead")),
    )
    failure = RuntimeError("inside the model")
    with forwards_of(twin) as fed, failing(twin.model.layers[1], 2, failure), pytest.warns(UserWarning, match="inside"):
        result = generator.generate(input_ids=random_prompt(100), max_tokens=30, sparse_prefill="on", gamma=4)
    assert result.metrics.acceptance_rate == 1.0
    # Once to be scored, and once more.
    assert positions_of(fed).count(0) == 2


def test_the_look_ahead_does_not_depend_on_the_seed(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    generator = generator_of(target, draft, replace(CHUNKS, keep_rate=0.3, chunk_size=4))
    options: dict[str, Any] = {"temperature": 5.0, "max_tokens": 1, "sparse_prefill": "on"}
    with forwards_of(target) as fed:
        for seed in range(5):
            generator.generate(input_ids=random_prompt(90), seed=seed, **options)
    assert all(first == fed[0] for first in fed)


def test_draft_and_target_are_warped_alike(target: PreTrainedModel) -> None:
    options: dict[str, Any] = {"temperature": 3.0, "top_k": 6, "top_p": 0.7, "seed": 0, "gamma": 4}
    generator = SpecStackGenerator(target, make_model(seed=1))
    metrics = generator.generate(input_ids=random_prompt(20), max_tokens=60, **options).metrics
    assert (metrics.acceptance_rate or 0) > 0.99


@pytest.mark.parametrize("home", ["generation_config", "config"])
def test_every_end_token_ends_wherever_it_is_configured(home: str, target: PreTrainedModel) -> None:
    # The target as its own draft: proposals are accepted whole.
    generator = SpecStackGenerator(target, make_model(seed=1))
    options: dict[str, Any] = {"input_ids": random_prompt(20), "max_tokens": 30}
    plain = generator.generate(gamma=0, **options).token_ids
    unused = next(token for token in range(64) if token not in plain)
    target.generation_config.eos_token_id = None
    getattr(target, home).eos_token_id = [unused, plain[9]]
    for gamma in (0, 4, 8):
        result = generator.generate(gamma=gamma, **options)
        assert (result.token_ids, result.finish_reason) == (plain[: plain.index(plain[9]) + 1], "eos")
        assert generator.generate(gamma=gamma, ignore_eos=True, **options).token_ids == plain


class Unhurried(Policy):
    """Gamma 2, after 20 ms of thought."""

    name = "unhurried"

    def choose(self, context: StepContext) -> int:
        time.sleep(0.02)
        return 2


def test_durations_are_where_the_time_went(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Lower bounds only: how fast the machine is does not matter."""
    target.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    generator = generator_of(target, draft, CHUNKS)
    begun = time.monotonic()
    stream = generator.stream(input_ids=random_prompt(80), max_tokens=12, sparse_prefill="on", policy=Unhurried())
    outputs, by_caller = [], 0.0
    for output in stream:
        outputs.append(output)
        if output.metrics is None:
            rested = time.monotonic()
            time.sleep(0.05)
            by_caller += time.monotonic() - rested
    whole = time.monotonic() - begun
    metrics, records = outputs[-1].metrics, [output.record for output in outputs]
    assert metrics is not None
    assert 0 < metrics.scoring_s <= metrics.ttft_s - 0.05 <= metrics.total_s - 0.05
    assert metrics.total_s >= 0.07 * (metrics.num_steps - 1)
    assert metrics.total_s <= whole - by_caller, "the caller's own time counts too"
    assert metrics.num_first_tokens == records[0].num_tokens
    later = metrics.num_tokens - metrics.num_first_tokens
    assert metrics.decode_tokens_per_s == pytest.approx(later / (metrics.total_s - metrics.ttft_s))
    assert records[0].draft_s == metrics.scoring_s
    assert all(record.verify_s >= 0.05 for record in records)
    assert all(record.policy_s >= 0.02 for record in records[1:])
    assert not any(record.draft_prefilled_prompt for record in records)


def test_the_step_in_which_the_draft_reads_the_prompt_is_marked(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    result = SpecStackGenerator(target, draft).generate(
        input_ids=random_prompt(30), max_tokens=12, gamma=2, return_records=True
    )
    assert [record.draft_prefilled_prompt for record in result.records or []][:4] == [False, True, False, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_auto_leaves_prompts_dense_that_would_gain_nothing() -> None:
    least = PrefillConfig.min_prompt_tokens
    assert SpecStackGenerator.from_pretrained(device="cuda").config.prefill.min_prompt_tokens > least
    given = SpecStackConfig(PrefillConfig(min_prompt_tokens=least))
    assert SpecStackGenerator.from_pretrained(device="cuda", config=given).config.prefill.min_prompt_tokens == least


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_tokens_are_those_of_the_cpu(embedded: SpecStackGenerator) -> None:
    on_cuda = SpecStackGenerator.from_pretrained(device="cuda", precision="fp32")
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    for extra in ({}, {"sparse_prefill": "on", "keep_rate": 0.5}):
        assert (
            on_cuda.generate(CODE * 40, **options, **extra).token_ids
            == embedded.generate(CODE * 40, **options, **extra).token_ids
        )


def test_a_prompt_of_one_line_is_not_cut_and_says_so(embedded: SpecStackGenerator) -> None:
    metrics = embedded.generate("apple pear plum fig " * 15, max_tokens=1, sparse_prefill="on", keep_rate=0.2).metrics
    assert metrics.num_kept_tokens == metrics.num_prompt_tokens
    assert metrics.sparse_prefill_reason.endswith("but the ends and protected spans cover the whole prompt")
