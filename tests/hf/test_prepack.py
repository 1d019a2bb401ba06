from __future__ import annotations

import pytest
import torch
from torch import nn

from spec_stack import SpecStackGenerator
from spec_stack.hf.prepack import PrepackedLinear, can_prepack, prepack
from spec_stack.pair import ModelPair
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
    for options in ({}, {"specprefill": True, "keep_rate": 0.5}):
        results = [g.generate(input_ids=prompt, max_tokens=40, ignore_eos=True, **options) for g in (plain, embedded)]
        assert results[0].token_ids == results[1].token_ids


def test_prepacking_where_it_cannot_work_is_refused() -> None:
    assert not can_prepack(torch.device("cpu"), torch.float16)
    assert not can_prepack(torch.device("cuda"), torch.float32)
    with pytest.warns(match="fp16 prefill"), pytest.raises(ValueError, match="prepack_linears"):
        ModelPair.load(precision="fp16", device="cpu", prepack_linears=True)
