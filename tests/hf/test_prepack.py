from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from spec_stack import SpecStackGenerator
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.prepack import PrepackedLinear, can_prepack, has_bf16_instructions, prepack
from tests.support.models import random_prompt


def test_the_operators_work_wherever_torch_has_them() -> None:
    """Else the checks below would be skipped by the very fault they are for."""
    if hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available():
        assert can_prepack(torch.device("cpu"), torch.float32)
        if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):  # oneDNN's bf16 layout needs it
            assert can_prepack(torch.device("cpu"), torch.bfloat16)


needs_operators = pytest.mark.skipif(
    not can_prepack(torch.device("cpu"), torch.float32), reason="this torch build lacks the oneDNN operators"
)


@needs_operators
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 96), (300, 500), (1024, 1200)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_prepacked_layer_gives_the_plain_layers_product(
    dtype: torch.dtype, shape: tuple[int, int], bias: bool
) -> None:
    if not can_prepack(torch.device("cpu"), dtype):
        pytest.skip(f"this processor has no instructions for {dtype} here")
    torch.manual_seed(0)
    linear = nn.Linear(*shape, bias=bias).to(dtype)
    packed = PrepackedLinear(linear)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for leading in ((1, 1), (1, 2), (5,), (2, 3), (1, 600)):
        inputs = torch.randn(*leading, shape[0]).to(dtype)
        with torch.inference_mode():
            torch.testing.assert_close(packed(inputs), linear(inputs), rtol=tolerance, atol=tolerance)


@needs_operators
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_added_leave_the_others_as_in_a_block_of_that_many(dtype: torch.dtype) -> None:
    if not can_prepack(torch.device("cpu"), dtype):
        pytest.skip(f"this processor has no instructions for {dtype} here")
    torch.manual_seed(0)
    packed = PrepackedLinear(nn.Linear(1024, 1200).to(dtype))
    assert packed.least_rows == (4 if dtype == torch.bfloat16 and has_bf16_instructions() else 1)
    inputs = torch.randn(4, 1024).to(dtype)
    with torch.inference_mode():
        packed.least_rows = 4
        whole = packed(inputs)
        for num_rows in (1, 2, 3, 4):
            part = packed(inputs[:num_rows])
            assert part.shape == (num_rows, 1200)
            torch.testing.assert_close(part, whole[:num_rows], rtol=0, atol=0)
        assert packed(inputs[None, None, :2]).shape == (1, 1, 2, 1200)


@needs_operators
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_loaded_models_layers_are_replaced_whether_its_ends_are_tied(tmp_path: Path, is_tied: bool) -> None:
    config = LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=4, vocab_size=2048, tie_word_embeddings=is_tied
    )
    made = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path)
    ids = torch.arange(50)[None]
    with torch.inference_mode():
        expected = made.eval()(ids).logits
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prepack(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    if is_tied:
        torch.testing.assert_close(model.get_input_embeddings().weight, made.get_input_embeddings().weight)


@needs_operators
def test_only_plain_layers_of_some_size_are_replaced() -> None:
    class Quantized(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(8, 8), Quantized(300, 300), nn.Sequential(nn.Linear(400, 300)))
    assert prepack(model) == 2
    kinds = [type(model[0]), type(model[1]), type(model[2]), type(model[3][0])]
    assert kinds == [PrepackedLinear, nn.Linear, Quantized, PrepackedLinear]


@needs_operators
def test_the_embedded_pair_gives_the_same_tokens_prepacked(embedded: SpecStackGenerator) -> None:
    plain = SpecStackGenerator.from_pretrained(
        device="cpu", precision="fp32", prepack_linears=False, config=embedded.config, calibration=False
    )
    assert not any(isinstance(module, PrepackedLinear) for module in plain.target.modules())
    assert any(isinstance(module, PrepackedLinear) for module in embedded.target.modules())
    prompt = random_prompt(300, vocab=4096)
    for options in ({}, {"sparse_prefill": "on", "keep_rate": 0.5}):
        results = [g.generate(input_ids=prompt, max_tokens=40, ignore_eos=True, **options) for g in (plain, embedded)]
        assert results[0].token_ids == results[1].token_ids


def test_nothing_is_prepacked_where_it_cannot_work() -> None:
    assert not can_prepack(torch.device("cpu"), torch.float16)
    assert not can_prepack(torch.device("cuda"), torch.float32)
    with pytest.warns(match="fp16 prefill"):
        pair = ModelPair.load(precision="fp16", device="cpu", prepack_linears=True)
    assert not any(isinstance(module, PrepackedLinear) for module in pair.target.modules())


def test_a_prepacked_target_saves_its_true_weights(embedded: SpecStackGenerator, tmp_path: Path) -> None:
    if not any(isinstance(module, PrepackedLinear) for module in embedded.target.modules()):
        pytest.skip("nothing is prepacked here")
    embedded.target.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    plain = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", prepack_linears=False).target
    expected = plain.state_dict()
    assert set(saved.state_dict()) == set(expected)
    for name, weight in saved.state_dict().items():
        assert torch.equal(weight, expected[name]), name
