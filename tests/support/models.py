"""Tiny random models of the plain families, prompts and tokenizers for them. Nothing here touches the network."""

from __future__ import annotations

import copy

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 64
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": LlamaConfig(**_SHAPE),
    "mistral": MistralConfig(**_SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**_SHAPE, use_sliding_window=False),
    "qwen3": Qwen3Config(**_SHAPE),
}


def make_model(
    family: str = "llama", seed: int = 0, implementation: str = "sdpa", vocab: int = VOCAB
) -> PreTrainedModel:
    """A random model whose attention is far from uniform, so that mistakes in positions or masks show."""
    torch.manual_seed(seed)
    config = copy.deepcopy(FAMILIES[family])
    config.vocab_size = vocab
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3 if "_proj" in name else 1.0)
    return model


def disturbed(model: PreTrainedModel, scale: float) -> PreTrainedModel:
    """A copy of a plain llama that mostly agrees with it."""
    twin = make_model(seed=1)
    twin.load_state_dict(model.state_dict())
    torch.manual_seed(11)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.add_(scale * torch.randn_like(weight))
    return twin


def random_prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    return torch.randint(2, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_tokenizer(tokens: str, specials: str = "", bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE with these tokens (separated by spaces), ids in their order after the special ones; a token of
    several letters is merged from its longest known beginning and the rest. bos: the first special begins a text."""
    special, ordinary = specials.split(), tokens.split()
    merges = []
    for token in ordinary:
        if len(token) > 1:
            cut = max(n for n in range(1, len(token)) if token[:n] in ordinary and token[n:] in ordinary)
            merges.append((token[:cut], token[cut:]))
    vocab = {token: index for index, token in enumerate([*special, *ordinary])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0] if bos else None)


def byte_fallback_tokenizer(pieces: str, strips: bool = True) -> PreTrainedTokenizerFast:
    """As Llama 2's: three special tokens, a token for every byte, then these pieces (separated by spaces); its decoder
    drops a text's first space, unless it does not strip (as Gemma's)."""
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces.split()]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
