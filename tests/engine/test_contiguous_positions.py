"""The kept tokens as an ordinary prompt: tokens are those of transformers' own `generate` over them."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    MptConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    RwkvConfig,
)

from spec_stack import PrefillConfig, SessionConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.hf.architectures import check_architecture
from tests.support import reference, tiny_architectures
from tests.support.forwards import forwards_of, tokens_of
from tests.support.matrix import RandomGamma
from tests.support.nightly import others_nightly
from tests.support.tiny_architectures import DENSE, VOCAB, random_prompt

_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
# Tokens from which the long RoPE has other angles.
SWITCH = 48
# Architectures that original positions refuse.
OTHERS: dict[str, Any] = {
    "Bloom": BloomConfig(**_TOKENS, hidden_size=32, n_layer=3, n_head=4),
    "MPT": MptConfig(**_TOKENS, d_model=32, n_layers=3, n_heads=4, max_seq_len=512),
    "Falcon, ALiBi": FalconConfig(**_TOKENS, **_SHAPE, alibi=True, new_decoder_architecture=False),
    "GPT-2": GPT2Config(**_TOKENS, n_embd=32, n_layer=3, n_head=4, n_positions=512),
    "OPT": OPTConfig(**_TOKENS, **_SHAPE, word_embed_proj_dim=32, ffn_dim=48, max_position_embeddings=512),
    "Gemma2": Gemma2Config(**DENSE, sliding_window=16, query_pre_attn_scalar=24),
    "DeepSeek-V3": DeepseekV3Config(
        **_TOKENS,
        **_SHAPE,
        intermediate_size=48,
        moe_intermediate_size=32,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        max_position_embeddings=512,
    ),
    "Phi3, long RoPE": Phi3Config(
        **{name: value for name, value in DENSE.items() if name != "head_dim"},
        original_max_position_embeddings=SWITCH,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2.0, 4.0, 8.0],
            "original_max_position_embeddings": SWITCH,
        },
    ),
    "Llama, dynamic RoPE": tiny_architectures.REFUSED["Llama, dynamic RoPE"],
}
# Among so few tokens a draft that knows nothing is right now and then.
FEW = (3, 17, 42)
# Without a tokenizer a prompt has no lines.
_CHUNKS = {"granularity": "chunks", "chunk_size": 8}
SUPPORTED = ["Llama", "Mistral, sliding", "Gemma3", "GPT-OSS", "Qwen3.5", "Qwen3-Next", "Falcon-H1"]


def make_model(name: str, disturbed: bool = False) -> PreTrainedModel:
    if name in SUPPORTED:
        return tiny_architectures.make_model(name, disturbed=disturbed)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(OTHERS[name])).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    return model


def make_generator(name: str, **prefill: Any) -> SpecStackGenerator:
    config = PrefillConfig(**_CHUNKS | {"keep_rate": 0.3, "positions": "contiguous"} | prefill)
    draft = tiny_architectures.make_model("Llama")
    return SpecStackGenerator(make_model(name), draft, config=SpecStackConfig(config))


def greedy(name: str, prompt: list[int], num_tokens: int, **options: Any) -> list[int]:
    """transformers' own greedy tokens. Before 5.24 its cached ones are wrong past a long RoPE's switch: it drops the
    cache there and goes on from the last token alone."""
    return reference.greedy(make_model(name), prompt, num_tokens, use_cache="long RoPE" not in name, **options)


USUAL = ("Gemma3", "GPT-OSS", "Falcon-H1")
ALIKE = ("MPT", "Falcon, ALiBi", "OPT", "Gemma2")


@pytest.mark.parametrize(
    ("name", "prefill_chunk"),
    others_nightly(
        [*((name, 7) for name in [*SUPPORTED, *OTHERS]), ("Llama", 4096), ("Qwen3.5", 4096)],
        # Without those that have their kind of cache and of positions from another one.
        usual=[*((name, 7) for name in (*USUAL, *OTHERS) if name not in ALIKE), ("Qwen3.5", 4096)],
    ),
)
def test_greedy_tokens_are_those_of_the_kept_tokens_as_a_prompt(name: str, prefill_chunk: int) -> None:
    prompt = random_prompt(120)
    generator = make_generator(name, prefill_chunk=prefill_chunk)
    with forwards_of(generator.target) as fed:
        options = {"sparse_prefill": "on", "policy": RandomGamma(1), "logit_bias": dict.fromkeys(FEW, 100.0)}
        result = generator.generate(input_ids=prompt, max_tokens=24, **options)
    metrics = result.metrics
    assert metrics.num_prompt_tokens == 120
    assert metrics.num_kept_tokens < 60
    assert metrics.num_proposed > metrics.num_accepted > 0
    kept = tokens_of(fed)[: metrics.num_kept_tokens]
    assert result.token_ids == greedy(name, kept, 24, sequence_bias={(at,): 100.0 for at in FEW})


def test_a_long_rope_changes_its_angles_where_transformers_does() -> None:
    name, prompt = "Phi3, long RoPE", random_prompt(60)
    session, crosses = make_generator(name, prefill_chunk=9).session(), []
    for _ in range(2):
        options = {"sparse_prefill": "on", "policy": RandomGamma(2), "logit_bias": dict.fromkeys(FEW, 99.0)}
        result = session.generate(input_ids=prompt, max_tokens=30, **options)
        kept = kept_of(session, prompt)
        crosses.append(len(kept) < SWITCH < len(kept) + 30)
        bias = {(at,): 99.0 for at in FEW}
        assert result.token_ids == greedy(name, kept, 30, sequence_bias=bias)
        prompt = [*prompt, *result.token_ids, *random_prompt(10)]
    assert any(crosses)


def test_sampled_tokens_have_the_law_of_the_kept_tokens_as_a_prompt() -> None:
    prompt, generator, model = random_prompt(60), make_generator("Bloom"), make_model("Bloom")
    with forwards_of(generator.target) as fed:
        drawn = {"temperature": 1.0, "top_k": 2, "max_tokens": 2, "gamma": 2, "sparse_prefill": "on", "seed": 0}
        result = generator.generate(input_ids=prompt, n=128, **drawn)
    kept = tokens_of(fed)[: result.metrics.num_kept_tokens]

    def law(*more: int) -> dict[int, float]:
        with torch.no_grad():
            values, ids = model(torch.tensor([[*kept, *more]])).logits[0, -1].topk(2)
        return dict(zip(ids.tolist(), values.softmax(0).tolist(), strict=True))

    expected = {(one, two): p * q for one, p in law().items() for two, q in law(one).items()}
    counts = Counter(tuple(each.token_ids) for each in result.choices)
    assert set(counts) <= set(expected)
    assert sum(abs(counts[pair] / 128 - share) for pair, share in expected.items()) / 2 < 0.1


def kept_of(session: Any, prompt: list[int]) -> list[int]:
    dropped = set(session.dropped_positions)
    return [token for at, token in enumerate(prompt) if at not in dropped]


@pytest.mark.parametrize("name", ["Llama", "GPT-OSS", "Qwen3.5", "Bloom"])
def test_what_a_session_recalls_goes_back_to_its_place_in_order(name: str, tmp_path: Path) -> None:
    generator, num_restored = make_generator(name, keep_rate=0.4), 0
    session = generator.session(SessionConfig(recall_threshold=0.0, max_recalled_chunks=4, recall_word_threshold=None))
    prompt: list[int] = []
    for turn in range(3):
        prompt = prompt + random_prompt(50, seed=turn)
        if turn == 1:
            session.save(tmp_path / "saved")
            session = generator.load_session(tmp_path / "saved")
        with forwards_of(generator.target) as fed:
            result = session.generate(input_ids=prompt, max_tokens=8, sparse_prefill="on", policy=RandomGamma(turn))
        kept = kept_of(session, prompt)
        assert result.token_ids == reference.greedy(make_model(name), kept, 8)
        assert result.metrics.num_kept_tokens == len(kept)
        num_restored += result.metrics.num_recalled_tokens
        if turn and not result.metrics.num_recalled_tokens:
            assert len(tokens_of(fed)) < len(kept)
        prompt = prompt + result.token_ids
    assert num_restored > 0


def test_an_edited_turn_goes_back_and_a_dense_turn_stays_dense() -> None:
    generator = make_generator("Bloom")
    session, prompt = generator.session(), random_prompt(90)
    first = session.generate(input_ids=prompt, max_tokens=8, sparse_prefill="on")
    for edited in ([*prompt, *first.token_ids, 5, 6], [*prompt[:70], 9, 9]):
        result = session.generate(input_ids=edited, max_tokens=8, sparse_prefill="off")
        assert result.token_ids == reference.greedy(make_model("Bloom"), kept_of(session, edited), 8)


@pytest.mark.parametrize("name", OTHERS)
def test_original_positions_are_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(ValueError, match=r'PrefillConfig\(positions="contiguous"\)'):
        make_generator(name, positions="original")


def test_what_cannot_go_back_is_refused_either_way() -> None:
    with pytest.raises(ValueError, match="cannot be rolled back"):
        check_architecture("target", RwkvConfig(), "contiguous")
    with pytest.raises(ValueError, match="its recurrent state"):
        check_architecture("target", tiny_architectures.REFUSED["Mamba-2 alone"], "contiguous")
    with pytest.raises(ValueError, match="'rwkv'") as error:
        check_architecture("target", RwkvConfig())
    assert "contiguous" not in str(error.value)


def test_a_draft_scores_at_its_own_positions_whatever_the_targets_are() -> None:
    with pytest.raises(ValueError, match="the draft is a 'bloom' model"):
        SpecStackGenerator(
            make_model("Llama"), make_model("Bloom"), config=SpecStackConfig(PrefillConfig(positions="contiguous"))
        )
