"""Prompts remembered outside sessions: the same tokens as without, less to read, and no more memory than allowed."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import pytest

from spec_stack import PrefillConfig, PrefixCacheConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.prefill.queries import WINDOW
from tests.api.test_session import SPARSE
from tests.support import tiny_architectures
from tests.support.models import make_model, make_tokenizer, random_prompt
from tests.support.nightly import others_nightly

SYSTEM = random_prompt(60, seed=99)


def make_generators(
    prefill: PrefillConfig = SPARSE, max_tokens: int = 4000
) -> tuple[SpecStackGenerator, SpecStackGenerator]:
    """One with a store, one without."""
    configs = (SpecStackConfig(prefill, prefix_cache=PrefixCacheConfig(max_tokens)), SpecStackConfig(prefill))
    one, two = (SpecStackGenerator(make_model(seed=1), make_model(seed=2), config=config) for config in configs)
    return one, two


def prompts(seed: int) -> list[list[int]]:
    """Prompts with one system message, some of them again, some longer or cut."""
    rng = random.Random(seed)
    made: list[list[int]] = []
    for index in range(8):
        kind = rng.choice(["new", "again", "longer", "cut"]) if made else "new"
        if kind == "new":
            made.append([*SYSTEM, *random_prompt(rng.randrange(5, 150), seed=100 * seed + index)])
        else:
            prompt = rng.choice(made)
            cut = rng.randrange(1, len(prompt)) if kind == "cut" else len(prompt)
            more = random_prompt(rng.randrange(1, 60), seed=index) if kind != "again" else []
            made.append([*prompt[:cut], *more])
    return made


@pytest.mark.parametrize("seed", others_nightly(range(3), usual=[0]))
@pytest.mark.parametrize(
    "prefill",
    [
        SPARSE,
        PrefillConfig(keep_rate=1.0),
        PrefillConfig(keep_rate=0.4, chunk_size=8, min_prompt_tokens=80, draft_window=32, draft_sinks=8),
        PrefillConfig(keep_rate=0.4, chunk_size=8, min_prompt_tokens=80, draft_window=(170, 32), draft_sinks=8),
        PrefillConfig(keep_rate=0.4, chunk_size=8, min_prompt_tokens=80),
        PrefillConfig(keep_rate=0.4, chunk_size=8, min_prompt_tokens=80, num_scoring_layers=1),
        PrefillConfig(keep_rate=0.4, chunk_size=8, min_prompt_tokens=80, scorer="bm25"),
    ],
    ids=["sparse", "dense", "window", "window of long prompts", "full context", "first layers", "bm25"],
)
def test_a_store_changes_no_token(prefill: PrefillConfig, seed: int) -> None:
    stored, plain = make_generators(prefill)
    protected = [(0, len(SYSTEM))]
    num_cached = 0
    for index, prompt in enumerate(prompts(seed)):
        spans = [(start, min(stop, len(prompt))) for start, stop in protected]
        options: dict[str, Any] = {"input_ids": prompt, "protected": spans, "max_tokens": 6, "gamma": (3, 0)[index % 2]}
        if index == 5:
            options |= {"temperature": 1.0, "seed": 7}
        result, expected = stored.generate(**options), plain.generate(**options)
        assert result.token_ids == expected.token_ids
        metrics, without = result.metrics, expected.metrics
        for name in ("num_prompt_tokens", "num_kept_tokens", "sparse_prefill", "sparse_prefill_reason", "num_accepted"):
            assert getattr(metrics, name) == getattr(without, name), name
        assert metrics.num_cached_tokens + metrics.num_new_tokens == len(prompt)
        assert without.num_cached_tokens == 0
        num_cached += metrics.num_cached_tokens
    assert num_cached > len(SYSTEM)


def test_a_prompt_asked_again_is_read_by_neither_model() -> None:
    generator, _ = make_generators()
    sizes: dict[str, list[int]] = {"target": [], "draft": []}
    for name, size in sizes.items():
        getattr(generator, name).register_forward_pre_hook(
            lambda module, args, kwargs, size=size: size.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
    prompt = random_prompt(200)
    first = generator.generate(input_ids=prompt, max_tokens=3)
    assert first.metrics.sparse_prefill
    assert sum(sizes["draft"]) >= 199
    for size in sizes.values():
        size.clear()
    again = generator.generate(input_ids=prompt, max_tokens=3)
    assert again.token_ids == first.token_ids
    assert again.metrics.num_cached_tokens == 199
    assert again.metrics.sparse_prefill
    # The scoring queries run again.
    assert sum(sizes["draft"]) < 12 + WINDOW + 64
    assert sum(sizes["target"]) < 12
    assert sizes["target"][0] == 1


def test_a_dense_prompt_asked_again_is_read_by_neither_model_where_scored_ones_have_a_window() -> None:
    generator, _ = make_generators(replace(SPARSE, draft_window=32, draft_sinks=8))
    sizes: list[int] = []
    for model in (generator.target, generator.draft):
        model.register_forward_pre_hook(
            lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
    prompt = random_prompt(200)
    first = generator.generate(input_ids=prompt, max_tokens=6, sparse_prefill="off", gamma=2, proposer="model")
    assert sum(sizes) >= 399
    sizes.clear()
    again = generator.generate(input_ids=prompt, max_tokens=6, sparse_prefill="off", gamma=2, proposer="model")
    assert again.token_ids == first.token_ids
    assert sum(sizes) < 50


def test_what_is_shared_is_what_the_selections_have_in_common() -> None:
    """Of two documents behind one system message the target takes the message over, the draft too."""
    generator, _ = make_generators()
    spans = [(0, len(SYSTEM))]
    generator.generate(input_ids=[*SYSTEM, *random_prompt(120, seed=1)], protected=spans, max_tokens=2)
    result = generator.generate(input_ids=[*SYSTEM, *random_prompt(120, seed=2)], protected=spans, max_tokens=2)
    assert len(SYSTEM) <= result.metrics.num_cached_tokens < len(SYSTEM) + 120


def test_the_store_holds_no_more_than_it_may_and_forgets_on_request() -> None:
    generator, _ = make_generators(max_tokens=500)
    for seed in range(12):
        generator.generate(input_ids=random_prompt(150, seed=seed), max_tokens=2)
        assert 0 < generator.engine.prefix_cache.num_tokens <= 500
    # Asked again and again, a prompt is there once; one that is too long is not kept at all.
    num_tokens = generator.engine.prefix_cache.num_tokens
    generator.generate(input_ids=random_prompt(150, seed=11), max_tokens=2)
    generator.generate(input_ids=random_prompt(900, seed=1), max_tokens=2, sparse_prefill="off")
    assert generator.engine.prefix_cache.num_tokens == num_tokens
    generator.reset_prefix_cache()
    assert generator.engine.prefix_cache.num_tokens == 0
    assert generator.generate(input_ids=random_prompt(150, seed=11), max_tokens=2).metrics.num_cached_tokens == 0


def held_bytes(generator: SpecStackGenerator) -> int:
    """Memory behind the tensors of everything stored, however little of it they show."""
    behind = {}
    for stored in generator.engine.prefix_cache._stored:
        for model in (stored.target, stored.index):
            for name, tensor in (model.contents() if model is not None else {}).items():
                if name.startswith("cache."):
                    behind[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(behind.values())


@pytest.mark.parametrize(
    "prefill",
    [SPARSE, pytest.param(PrefillConfig(keep_rate=1.0), marks=pytest.mark.nightly)],
    ids=["sparse", "dense"],
)
def test_many_calls_with_long_answers_hold_no_more_memory_than_is_counted(prefill: PrefillConfig) -> None:
    generator, _ = make_generators(prefill, max_tokens=2000)
    # Keys and values of 3 layers, 2 heads of 16 numbers each, 4 bytes.
    bytes_per_token = 2 * 3 * 2 * 16 * 4
    for seed in range(30):
        prompt = random_prompt((13, 13, 300)[seed % 3], seed=seed)
        stream = generator.stream(input_ids=prompt, max_tokens=100, gamma=0)
        for _, _output in zip(range(20), stream, strict=False):
            pass
        stream.close()
        store = generator.engine.prefix_cache
        assert 0 < held_bytes(generator) <= 1.1 * bytes_per_token * store.num_tokens


def test_the_latest_used_prompt_stays() -> None:
    generator, _ = make_generators(PrefillConfig(keep_rate=1.0), max_tokens=500)
    one, two, three = (random_prompt(100, seed=seed) for seed in range(3))
    for prompt in (one, two, one, three):
        generator.generate(input_ids=prompt, max_tokens=2, gamma=2)
    assert generator.generate(input_ids=one, max_tokens=2).metrics.num_cached_tokens == 99


def test_streams_that_end_early_or_fail_leave_the_store_fit_for_use() -> None:
    generator, plain = make_generators()
    prompt = random_prompt(200)
    expected = plain.generate(input_ids=prompt, max_tokens=12, gamma=2).token_ids
    stream = generator.stream(input_ids=prompt, max_tokens=12, gamma=2)
    next(stream)
    other = generator.stream(input_ids=prompt, max_tokens=12, gamma=2)
    next(other)
    stream.close()
    tokens = [token_id for output in other for token_id in output.token_ids]
    assert tokens == expected[len(expected) - len(tokens) :]

    def fail(module: Any, args: Any) -> None:
        raise RuntimeError("stopped")

    handle = generator.target.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stopped"):
        generator.generate(input_ids=prompt, max_tokens=12)
    handle.remove()
    again = generator.generate(input_ids=prompt, max_tokens=12, gamma=2)
    assert again.token_ids == expected
    assert again.metrics.num_cached_tokens == 199


def test_threads_share_a_store() -> None:
    generator, plain = make_generators(max_tokens=900)
    asked = [[*SYSTEM, *random_prompt(40 + 30 * (seed % 4), seed=seed % 4)] for seed in range(12)]
    expected = [plain.generate(input_ids=prompt, max_tokens=5, gamma=2).token_ids for prompt in asked]
    found: list[list[int]] = [[] for _ in asked]

    def answer(index: int) -> None:
        found[index] = generator.generate(input_ids=asked[index], max_tokens=5, gamma=2).token_ids

    threads = [threading.Thread(target=answer, args=(index,)) for index in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    assert generator.engine.prefix_cache.num_tokens <= 900


@pytest.mark.parametrize(
    "name", others_nightly(["Gemma3", "GPT-OSS", "Qwen3.5", "Falcon-H1"], usual=["Gemma3", "Qwen3.5"])
)
def test_windows_and_recurrent_states_give_the_tokens_that_they_give_without(name: str) -> None:
    models = tiny_architectures.make_model(name), tiny_architectures.make_model(name, disturbed=True)
    config = SpecStackConfig(PrefillConfig(keep_rate=0.4, chunk_size=8, min_prompt_tokens=64))
    plain = SpecStackGenerator(*models, config=config)
    stored = SpecStackGenerator(*models, config=SpecStackConfig(config.prefill, prefix_cache=PrefixCacheConfig(2000)))
    base = random_prompt(100, vocab=tiny_architectures.VOCAB)
    for prompt in (base, base, base[:70], [*base, *base[:20]]):
        options: dict[str, Any] = {"input_ids": prompt, "max_tokens": 5, "gamma": 2}
        assert stored.generate(**options).token_ids == plain.generate(**options).token_ids


def test_a_draft_with_another_tokenizer_is_remembered_too() -> None:
    tokenizers = make_tokenizer("a b c d e f ab abc de cd", "<t>"), make_tokenizer("f e bc d abc c b ef a", "<s>")
    models = make_model(seed=1, vocab=16), make_model(seed=2, vocab=12)
    config = SpecStackConfig(SPARSE, prefix_cache=PrefixCacheConfig(2000))
    plain = SpecStackGenerator(*models, tokenizers[0], config=SpecStackConfig(SPARSE), draft_tokenizer=tokenizers[1])
    stored = SpecStackGenerator(*models, tokenizers[0], config=config, draft_tokenizer=tokenizers[1])
    text = "abcdefdeab" * 20
    for prompt in (text, text, text[:120], text + "fedcba"):
        result = stored.generate(prompt, max_tokens=5, gamma=2)
        assert result.token_ids == plain.generate(prompt, max_tokens=5, gamma=2).token_ids
    assert result.metrics.num_cached_tokens


def test_a_bound_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="0 is off"):
        PrefixCacheConfig(-1)
