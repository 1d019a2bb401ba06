"""Every entry of the support table, held to what it says, on tiny random models in fp32."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    NemotronHConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    masking_utils,
    modeling_flash_attention_utils,
)

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.hf import attention
from spec_stack.hf import model as hf_model
from spec_stack.hf.architectures import SUPPORTED, abilities, check_architecture, scoring_limit
from spec_stack.hf.model import CachedModel
from spec_stack.hf.slots import SlotPositions
from tests.support import matrix, reference, reference_architectures, support_table
from tests.support.cuda import flash_on_cpu
from tests.support.matrix import KEPT, NUM_PROMPT, cached
from tests.support.nightly import others_nightly
from tests.support.tiny_architectures import (
    CONFIGS,
    HAS_OLD_STATES,
    REFUSED,
    WINDOW,
    has_states,
    make_model,
    random_prompt,
)

needs_newer_states = pytest.mark.skipif(HAS_OLD_STATES, reason="this transformers is refused recurrent states")
# Largest error allowed, in units of the largest expected value; importances are at most 1.
TOLERANCE = 5e-5
EXACT_DECODING = [name for name in CONFIGS if abilities(CONFIGS[name]).decode.level == "exact"]
SCORERS = [name for name in EXACT_DECODING if abilities(CONFIGS[name]).score.level == "exact"]
SLIDING = [name for name in CONFIGS if "sliding" in reference_architectures.attention_layers(CONFIGS[name])]
RECURRENT = [name for name in CONFIGS if has_states(CONFIGS[name])]
# One of each kind: plain, sliding windows, sinks, an attention with a recurrent state before and beside it.
KINDS = ("Llama", "Gemma3", "GPT-OSS", "Qwen3.5", "Falcon-H1")
DYNAMIC = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}
# Of a prompt and of the pooling; and of the chunks of a prefill.
SIZES = [(NUM_PROMPT, 5), (NUM_PROMPT, 1), (WINDOW - 4, 3)]
CHUNKS = [7, 4096, 1]
WINDOWS = [(8, 3, 4096), (8, 0, 9), (1, 5, 17), (24, 4, 33), (NUM_PROMPT, 0, 4096)]


@pytest.mark.parametrize(
    ("name", "num_prompt", "pool_kernel"),
    others_nightly(
        [(name, *sizes) for name in SCORERS for sizes in SIZES],
        usual=[(name, *sizes) for name in SCORERS for sizes in (SIZES if name in KINDS else SIZES[:1])],
    ),
)
def test_importance_equals_eager_attention_over_the_layers_that_see_the_whole_prompt(
    name: str, num_prompt: int, pool_kernel: int
) -> None:
    assert matrix.score_error(name, num_prompt, pool_kernel) < 5e-6


@pytest.mark.parametrize(
    ("name", "prefill_chunk"),
    others_nightly(
        [(name, chunk) for name in EXACT_DECODING for chunk in CHUNKS],
        usual=[(name, chunk) for name in EXACT_DECODING for chunk in (CHUNKS if name in KINDS else CHUNKS[:1])],
    ),
)
def test_sparse_prefill_equals_a_forward_without_cache_at_the_original_positions(name: str, prefill_chunk: int) -> None:
    assert matrix.sparse_error(name, prefill_chunk) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "kept", "window", "num_sinks", "prefill_chunk"),
    [
        # The whole prompt in every other window, and what is kept of it in the rest.
        *(
            (name, (range(NUM_PROMPT), KEPT)[(number + at) % 2], *window)
            for number, name in enumerate(KINDS)
            for at, window in enumerate(WINDOWS)
        ),
        *((name, KEPT, *WINDOWS[at % len(WINDOWS)]) for at, name in enumerate(EXACT_DECODING) if name not in KINDS),
    ],
)
def test_a_prompt_prefilled_with_a_window_equals_an_explicit_mask(
    name: str, kept: Sequence[int], window: int, num_sinks: int, prefill_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small enough that blocks run as one batch, and that some do not.
    monkeypatch.setattr(attention, "_WINDOW_BLOCK", 5)
    # Rounding of the recurrent layers is larger over gaps; a token too many or too few is a thousand times that.
    assert matrix.windowed_error(name, window, num_sinks, prefill_chunk, kept) < 4 * TOLERANCE


@pytest.mark.parametrize("name", ["Llama", "Mistral, sliding", "Gemma3", "GPT-OSS", "Qwen3.5"])
@pytest.mark.parametrize("window", [None, 24])
def test_no_mask_is_as_large_as_a_long_block_times_a_long_cache(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_MAX_SCORES", 4 * 600 * 32)
    sizes, made = [0], SlotPositions.mask

    def note(self: SlotPositions, *arguments: Any) -> torch.Tensor:
        mask = made(self, *arguments)
        sizes.append(mask.numel())
        return mask

    monkeypatch.setattr(SlotPositions, "mask", note)
    prompt = random_prompt(600)
    model = cached(name, prefill_chunk=200)
    model.prefill(prompt, range(600), window, 4)
    assert max(sizes) <= 600 * 32
    monkeypatch.setattr(attention, "_MAX_SCORES", 1 << 26)
    whole = cached(name)
    whole.prefill(prompt, range(600), window, 4)
    rows = [each.forward([7], [600], 1) for each in (model, whole)]
    assert float((rows[0] - rows[1]).abs().max() / rows[1].abs().max()) < 4 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "prefill_chunk"),
    others_nightly(
        [(name, chunk) for name in EXACT_DECODING for chunk in (4096, 7)],
        usual=[*((name, 7) for name in EXACT_DECODING), *((name, 4096) for name in KINDS)],
    ),
)
def test_only_tokens_whose_logits_are_wanted_pass_the_last_layer(
    name: str, prefill_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys and values behind the logits are still those of all tokens."""
    monkeypatch.setattr(hf_model, "_CPU_APART", 1)
    assert matrix.sparse_error(name, prefill_chunk) < TOLERANCE
    model, num_rows = cached(name), []
    model.model.get_output_embeddings().register_forward_pre_hook(lambda _, args: num_rows.append(args[0].shape[1]))
    norm = [module for module in model.model.get_decoder().children() if "Norm" in type(module).__name__][-1]
    norm.register_forward_pre_hook(lambda _, args: num_rows.append(args[0].shape[1]))
    prompt = random_prompt(NUM_PROMPT)
    model.prefill(prompt[:40], range(40))
    model.forward(prompt[40:], range(40, NUM_PROMPT), 3)
    # In a Falcon-H1 layer a state reads beside the attention, so it runs whole.
    assert max(num_rows) == (40 if name == "Falcon-H1" else 3)
    assert num_rows[-2:] == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("name", others_nightly(EXACT_DECODING, usual=["Gemma3", "GPT-OSS", "Qwen3.5"]))
def test_greedy_speculation_gives_the_targets_own_tokens_past_acceptances_and_rejections(name: str) -> None:
    runs = [matrix.decoded(name, seed) for seed in range(2)]
    assert [run.num_equal for run in runs] == [run.num_tokens for run in runs]
    assert sum(run.num_accepted for run in runs) > 10
    assert sum(run.num_rejected for run in runs) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", others_nightly(EXACT_DECODING, usual=["Llama", "Gemma3", "Falcon-H1"]))
def test_after_sparse_prefill_the_tokens_are_those_of_the_pruned_prompt(name: str) -> None:
    # Its disturbed self may propose nothing but its own tokens, and another model hardly any of them.
    own = name if name in SCORERS else "Mistral"
    runs = [matrix.decoded_sparsely(name, draft, seed) for seed, draft in enumerate((own, "Mistral"))]
    assert [run.num_equal for run in runs] == [run.num_tokens for run in runs]
    assert sum(run.num_rejected for run in runs) > 0


@pytest.mark.parametrize(
    ("name", "seed"),
    others_nightly(
        [*((name, 0) for name in EXACT_DECODING), *((name, 1) for name in KINDS)],
        usual=[(name, 0) for name in {*KINDS, *RECURRENT}],
    ),
)
def test_after_any_mix_of_forwards_and_rollbacks_cache_and_state_equal_a_fresh_prefill(name: str, seed: int) -> None:
    assert matrix.rollback_error(name, seed) < TOLERANCE


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_states_work_or_are_refused_by_name_under_an_older_transformers(name: str) -> None:
    config = CONFIGS[name]
    levels = {abilities(config).sparse_prefill.level, abilities(config).decode.level}
    if not HAS_OLD_STATES:
        assert "refused" not in levels
        return
    assert levels == {"refused"}
    for role, positions in (("target", "original"), ("target", "contiguous"), ("draft", "original")):
        with pytest.raises(ValueError, match=r"transformers [\d.]+ keeps the state .*; install 5\.24"):
            check_architecture(role, config, positions)


@needs_newer_states
def test_nemotron_h_differs_only_by_transformers_own_bound_on_the_time_step() -> None:
    bounded, unbounded = (abilities(CONFIGS[name]) for name in ("Nemotron-H", "Nemotron-H, unbounded"))
    assert (bounded.score.level, bounded.decode.level) == ("approximate", "approximate")
    assert (unbounded.score.level, unbounded.decode.level) == ("exact", "exact")
    assert matrix.score_error("Nemotron-H") < 1e-3
    assert TOLERANCE < matrix.rollback_error("Nemotron-H", 1) < 0.1
    assert matrix.sparse_error("Nemotron-H") < 1e-3


@pytest.mark.parametrize("name", SLIDING)
def test_on_cuda_too_only_windows_get_a_mask(name: str) -> None:
    prompt = torch.tensor([random_prompt(NUM_PROMPT)])
    model = make_model(name)
    attention.install(model)
    with torch.no_grad(), flash_on_cpu():
        assert matrix.sparse_error(name, prefill_chunk=7) < TOLERANCE
        alone = model(prompt).logits[0]
    expected = reference_architectures.logits(make_model(name), prompt[0].tolist(), range(NUM_PROMPT))
    torch.testing.assert_close(alone, expected, atol=1e-3, rtol=1e-3)


def test_a_draft_whose_every_layer_slides_scores_only_what_it_sees_whole() -> None:
    name = "Mistral, sliding"
    assert scoring_limit(CONFIGS[name]) == WINDOW
    assert scoring_limit(CONFIGS["Gemma3"]) is None
    assert matrix.score_error(name, WINDOW - 4) < 1e-6
    config = SpecStackConfig(PrefillConfig(granularity="chunks"))
    generator = SpecStackGenerator(make_model("Mistral"), make_model(name), config=config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = generator.generate(input_ids=random_prompt(200), max_tokens=4, sparse_prefill="on")
    assert not result.metrics.sparse_prefill
    assert f"every attention layer of the draft slides over {WINDOW} tokens" in result.metrics.sparse_prefill_reason


def test_gaps_in_positions_are_never_read_as_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(*arguments: object, **options: object) -> None:
        raise AssertionError("packed-sequence detection was reached")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", packed)
    monkeypatch.setattr(modeling_flash_attention_utils, "_is_packed_sequence", packed)
    for name in ("Llama", "Gemma3", "GPT-OSS", "Qwen3.5"):
        model = cached(name, prefill_chunk=7)
        model.forward([random_prompt(NUM_PROMPT)[position] for position in KEPT], KEPT, 3)


def test_a_model_loaded_with_flash_attention_is_refused() -> None:
    # Its kernels read gaps between chunks as packed sequences, and slide over slots.
    model = make_model("Llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="load it with 'sdpa'"):
        attention.install(model)
    model = make_model("GPT-OSS")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="load it with 'eager'"):
        attention.install(model)


@pytest.mark.parametrize("name", ["GPT-OSS", "Gemma3", "Mistral, sliding", "Qwen3.5"])
def test_an_installed_model_still_generates_by_itself(name: str) -> None:
    prompt = torch.tensor([random_prompt(NUM_PROMPT)])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, "do_sample": False}
    expected = make_model(name).generate(prompt, **options)
    model = make_model(name)
    attention.install(model)
    assert torch.equal(model.generate(prompt, **options), expected)


def test_a_recurrent_state_goes_back_without_reading_the_prompt_again() -> None:
    prompt, proposal = random_prompt(NUM_PROMPT), random_prompt(6, seed=1)
    model = cached("Qwen3.5")
    model.forward(prompt + proposal, range(NUM_PROMPT + 6), 7)
    model.rollback(4)
    assert (model.num_cached, model.num_to_recompute) == (NUM_PROMPT + 2, 3)
    # However often the target rejects, it never drags more behind than one block can carry.
    for _ in range(40):
        start = model.num_cached
        model.forward(random_prompt(5), range(start, start + 5), 5)
        model.rollback(3)
        assert model.num_to_recompute <= 16 + 2
    model.rollback(0)
    assert model.num_cached == NUM_PROMPT + 2 + 40 * 2


def test_a_checkpoint_counts_no_tokens_that_wait_to_be_recomputed() -> None:
    text = [*random_prompt(NUM_PROMPT), *random_prompt(6, seed=1)]
    model, fresh = cached("Qwen3.5"), cached("Qwen3.5")
    model.forward(text, range(len(text)), 7)
    model.rollback(4)
    assert model.num_to_recompute
    model.checkpoint()
    model.forward([5], [len(text) - 4], 1)
    model.rollback(1)
    expected = fresh.forward([*text[:-4], 7], range(len(text) - 3), 1)
    torch.testing.assert_close(model.forward([7], [len(text) - 4], 1), expected, atol=1e-3, rtol=1e-3)


def test_a_drafts_states_are_kept_per_token_so_that_it_reads_nothing_again() -> None:
    model = cached("Qwen3.5")
    model.forward(random_prompt(NUM_PROMPT), range(NUM_PROMPT), 1)
    for index, token in enumerate(random_prompt(8, seed=1)):
        model.forward([token], [NUM_PROMPT + index], 1)
    model.rollback(5)
    assert (model.num_cached, model.num_to_recompute) == (NUM_PROMPT + 3, 0)


def test_a_model_with_a_state_keeps_its_whole_context() -> None:
    model = cached("Falcon-H1")
    model.forward(random_prompt(NUM_PROMPT), range(NUM_PROMPT), 1)
    model.keep_slots(KEPT)
    assert (model.num_cached, model.next_position) == (NUM_PROMPT, NUM_PROMPT)


@pytest.mark.parametrize(("name", "recomputes"), [("Qwen3.5", True), ("Llama", False)])
def test_records_count_the_tokens_recomputed(name: str, recomputes: bool) -> None:
    generator = SpecStackGenerator(make_model(name), make_model(name, disturbed=True))
    result = generator.generate(input_ids=random_prompt(NUM_PROMPT), max_tokens=30, gamma=4, return_records=True)
    records = result.records or []
    for last, record in pairwise(records):
        if last.num_accepted == last.gamma:
            continue
        # The tokens before the rejected one are undone with it, and so is the token before them.
        assert (record.num_recomputed >= last.num_accepted + 1) == recomputes
    assert any(record.num_recomputed for record in records) == recomputes


def test_sinks_are_honoured_however_few_queries_fit_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MAX_SCORES", 4 * 50 * 3)
    assert matrix.sparse_error("GPT-OSS") < TOLERANCE


def test_attention_refuses_a_cache_that_is_not_the_positions() -> None:
    model = cached("Llama")
    model.forward([3, 4, 5], range(3), 1)
    model.positions.append(7)
    with pytest.raises(RuntimeError, match="cached keys"):
        model.forward([6], [8], 1)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        *((config, "not among those") for name, config in REFUSED.items() if "RoPE" not in name),
        (REFUSED["Llama, dynamic RoPE"], "'dynamic' RoPE"),
        (Gemma3TextConfig(rope_parameters=dict.fromkeys(["full_attention", "sliding_attention"], DYNAMIC)), "dynamic"),
        (Gemma3TextConfig(use_bidirectional_attention=True), "bidirectional"),
    ],
)
def test_what_would_be_wrong_is_refused_in_both_roles_with_the_reason(config: Any, reason: str) -> None:
    refused = abilities(config)
    assert reason in refused.score.why
    assert {refused.score.level, refused.sparse_prefill.level, refused.decode.level} == {"refused"}
    for role in ("target", "draft"):
        with pytest.raises(ValueError, match=f"the {role} is a") as error:
            check_architecture(role, config)
        assert refused.score.why in str(error.value)


@needs_newer_states
def test_only_a_draft_needs_attention_layers() -> None:
    config = NemotronHConfig(hybrid_override_pattern="M-")
    check_architecture("target", config)
    assert abilities(config).score.level == "refused"
    with pytest.raises(ValueError, match="'nemotron_h' model with 0 attention layers"):
        check_architecture("draft", config)


def test_every_supported_architecture_is_in_the_matrix() -> None:
    assert {config.model_type for config in CONFIGS.values()} == set(SUPPORTED)


def test_the_support_page_has_the_table_of_the_matrix() -> None:
    page = support_table.PAGE.read_text(encoding="utf-8")
    current = support_table.replace_table(page)
    if HAS_OLD_STATES:
        # The page has the table of the newest transformers.
        differing = set(current.splitlines()) - set(page.splitlines())
        assert {line.split(" | ")[0].strip("| ") for line in differing} == set(RECURRENT) - set(support_table.UNLISTED)
    else:
        assert current == page, "run experiments/runs/support_table.sh --write"


@pytest.mark.parametrize("name", ["GPT-OSS", "Qwen3.5-MoE", "Nemotron-H, unbounded", "Falcon-H1", "Gemma3"])
def test_a_pair_loads_from_folders_and_generates(name: str, tmp_path: Path) -> None:
    folders = []
    for role in ("target", "draft"):
        make_model(name, disturbed=role == "draft").save_pretrained(tmp_path / role)
        folders.append(tmp_path / role)
        _add_tokenizer(tmp_path / role)
    generator = SpecStackGenerator.from_pretrained(*folders, device="cpu")
    prompt = random_prompt(120)
    result = generator.generate(input_ids=prompt, max_tokens=10, keep_rate=0.3, sparse_prefill="on")
    assert len(result.token_ids) == 10


def _add_tokenizer(folder: Path) -> None:
    vocab = {f"t{index}": index for index in range(CONFIGS["Llama"].vocab_size)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.mark.parametrize(
    ("config_class", "model_class", "name"),
    [
        (Gemma3Config, Gemma3ForConditionalGeneration, "Gemma3"),
        (Qwen3_5Config, Qwen3_5ForConditionalGeneration, "Qwen3.5"),
    ],
)
def test_the_text_part_of_a_composite_checkpoint_works_like_a_text_model(
    config_class: Any, model_class: Any, name: str, tmp_path: Path
) -> None:
    text = make_model(name)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"depth": 1, "num_heads": 2, "out_hidden_size": 32} if name == "Qwen3.5" else {"image_size": 28}
    composite = model_class(config_class(text_config=text.config.to_dict(), vision_config=vision | sizes))
    composite.model.language_model.load_state_dict(text.model.state_dict())
    composite.lm_head.load_state_dict(text.lm_head.state_dict())
    composite.save_pretrained(tmp_path)
    _add_tokenizer(tmp_path)
    generator = SpecStackGenerator.from_pretrained(tmp_path, tmp_path, device="cpu")
    prompt = random_prompt(NUM_PROMPT)
    kept = [prompt[position] for position in KEPT]
    got = CachedModel(generator.target, 7).forward(kept, KEPT, 4)
    torch.testing.assert_close(got, reference_architectures.logits(text, kept, KEPT)[-4:], atol=1e-4, rtol=1e-4)
    assert generator.generate(input_ids=prompt, max_tokens=8, gamma=3).token_ids == reference.greedy(text, prompt, 8)
