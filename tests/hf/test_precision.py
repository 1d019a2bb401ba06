from __future__ import annotations

import logging
import platform
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from spec_stack import SpecStackGenerator
from spec_stack.cli.doctor import diagnose
from spec_stack.config import PRECISIONS, LoadConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.loading import ASSETS, load_config
from spec_stack.hf.precision import (
    DTYPES,
    TIE_TOLERANCE,
    Precision,
    estimate_bytes,
    precision_of,
    resolve_precisions,
    unquantized_dtype,
)
from spec_stack.hf.prepack import has_bf16_instructions
from spec_stack.records import add_records, read_records
from tests.support import reference, tiny_architectures
from tests.support.controller_data import step
from tests.support.folders import copy_draft
from tests.support.models import FAMILIES, random_prompt
from tests.support.nightly import others_nightly
from tests.support.tiny_architectures import CONFIGS

CPU = torch.device("cpu")
PROMPT = "def read_lines(path):\n    "


@pytest.fixture(scope="module")
def generators() -> dict[str, SpecStackGenerator]:
    """The embedded pair at every precision that a CPU runs at a bearable speed."""
    names = [name for name in PRECISIONS if name != "fp16"]
    return {name: SpecStackGenerator.from_pretrained(device="cpu", precision=name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "pruned"),
    others_nightly(
        [("fp32", False), ("fp32", True), ("bf16", False), ("bf16", True), ("int8", False), ("nf4", True)],
        usual=[("fp32", True), ("bf16", False), ("int8", False), ("nf4", True)],
    ),
)
def test_speculation_gives_the_plain_greedy_tokens_of_its_precision_up_to_ties(
    generators: dict[str, SpecStackGenerator], precision: str, pruned: bool
) -> None:
    generator = generators[precision]
    num_parted = 0
    for seed in range(2):
        prompt = random_prompt(260, seed=seed, vocab=4096)
        options = {"max_tokens": 20, "ignore_eos": True, "sparse_prefill": "on" if pruned else "off", "keep_rate": 0.5}
        plain = generator.generate(input_ids=prompt, gamma=0, **options)
        ours = generator.generate(input_ids=prompt, gamma=4, **options)
        assert plain.metrics.sparse_prefill == pruned
        assert plain.metrics.precision == ours.metrics.precision == precision
        same = next((i for i in range(20) if plain.token_ids[i] != ours.token_ids[i]), None)
        if same is None or pruned:
            # Over a pruned cache a tie cannot be looked up by a plain forward; that few part is all that is asked.
            num_parted += same is not None
            continue
        ids = prompt + plain.token_ids[:same]
        logits = reference.logits(generator.target, ids, range(len(ids)))[-1].float()
        gap = float(logits[plain.token_ids[same]] - logits[ours.token_ids[same]])
        assert abs(gap) <= TIE_TOLERANCE[precision]
        num_parted += 1
    assert num_parted <= (0 if precision == "fp32" else 1)


@pytest.mark.parametrize("precision", ["bf16", "int8", "nf4"])
def test_a_lower_precision_stays_near_fp32(generators: dict[str, SpecStackGenerator], precision: str) -> None:
    ids = generators["fp32"].tokenizer(PROMPT * 4).input_ids
    exact, rounded = (
        reference.logits(generators[name].target, ids, range(len(ids))).float() for name in ("fp32", precision)
    )
    assert (exact - rounded).abs().max() > 0
    assert (
        torch.nn.functional.cosine_similarity(exact, rounded).min()
        > {"bf16": 0.999, "int8": 0.999, "nf4": 0.95}[precision]
    )


def test_what_is_quantized_and_what_is_not(generators: dict[str, SpecStackGenerator]) -> None:
    for name, kind in (("int8", "Linear8bitLt"), ("nf4", "Linear4bit")):
        target, draft = generators[name].target, generators[name].draft
        kinds = {type(module).__name__ for module in target.model.modules() if isinstance(module, nn.Linear)}
        assert kinds == {kind}
        assert target.lm_head.__class__.__name__ != kind
        assert (precision_of(target), precision_of(draft)) == (name, "fp32")
        assert (target.dtype, generators[name].pair.draft_precision) == (torch.float32, "fp32")


def test_target_and_draft_have_precisions_of_their_own() -> None:
    generator = SpecStackGenerator.from_pretrained(device="cpu", precision="bf16", draft_precision="nf4")
    assert (precision_of(generator.target), precision_of(generator.draft)) == ("bf16", "nf4")
    metrics = generator.generate(PROMPT, max_tokens=12).metrics
    assert (metrics.precision, metrics.draft_precision) == ("bf16", "nf4")


@pytest.mark.parametrize(
    ("load", "device", "expected"),
    [
        (LoadConfig(), "cpu", ("fp32", "fp32")),
        (LoadConfig(), "cuda", ("bf16", "bf16")),
        (LoadConfig("bf16"), "cpu", ("bf16", "bf16")),
        (LoadConfig("nf4"), "cpu", ("nf4", "fp32")),
        (LoadConfig("int8"), "cuda", ("int8", "bf16")),
        (LoadConfig("int8", "int8"), "cpu", ("int8", "int8")),
        (LoadConfig("auto", "bf16"), "cpu", ("fp32", "bf16")),
    ],
)
def test_the_defaults_follow_the_device_and_the_target(
    load: LoadConfig, device: str, expected: tuple[str, str]
) -> None:
    config = load_config(str(ASSETS / "target"))
    resolved = resolve_precisions(config, config, load, torch.device(device))
    assert tuple(precision.name for precision in resolved) == expected


LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("sizes", "stored", "instructions", "expected"),
    [
        (LARGE, torch.bfloat16, "avx512_bf16", "bf16"),
        (LARGE, torch.bfloat16, "amx_bf16", "bf16"),
        (LARGE, torch.bfloat16, "avx512_f", "fp32"),
        (LARGE, torch.float32, "avx512_bf16", "fp32"),
        (LARGE, torch.float16, "avx512_bf16", "fp32"),
        (LARGE, None, "avx512_bf16", "fp32"),
        ({"hidden_size": 64, "intermediate_size": 64}, torch.bfloat16, "avx512_bf16", "fp32"),
    ],
)
def test_a_large_checkpoint_stays_in_bf16_where_the_processor_multiplies_in_it(
    sizes: dict[str, int],
    stored: torch.dtype | None,
    instructions: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instructions: True, "avx2": True})
    config = LlamaConfig(dtype=stored, **sizes)
    small = load_config(str(ASSETS / "draft"))
    resolved = resolve_precisions(config, small, LoadConfig(), CPU)
    assert [each.name for each in resolved] == [expected, expected]
    given = resolve_precisions(config, config, LoadConfig("fp32", "auto"), CPU)
    assert [each.name for each in given] == ["fp32", "fp32"]
    quantized = resolve_precisions(config, config, LoadConfig("int8"), CPU)
    assert (quantized[0].name, quantized[0].dtype) == ("int8", torch.float32)
    assert quantized[1].name == expected


def test_bf16_instructions_are_those_that_the_system_lists() -> None:
    listed = Path("/proc/cpuinfo")
    if not listed.exists() or platform.machine() != "x86_64":
        pytest.skip("the system does not list them")
    flags = set(listed.read_text(encoding="utf-8").split())
    assert has_bf16_instructions() == bool(flags & {"avx512_bf16", "amx_bf16", "avx10_2"})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "nf4"])
def test_memory_is_foretold_from_the_configuration(precision: str) -> None:
    pair = ModelPair.load(device="cpu", precision=precision, draft_precision=precision, prepack_linears=False)
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        foretold = estimate_bytes(
            load_config(str(ASSETS / role)), Precision(precision, unquantized_dtype(precision, CPU))
        )
        assert model.get_memory_footprint(return_buffers=False) == pytest.approx(foretold, rel=0.02)


def test_the_doctor_shows_what_each_precision_takes() -> None:
    report = diagnose(None, None, "nf4", "cpu")
    assert report["problem"] is None
    assert (report["target"]["precision"], report["draft"]["precision"]) == ("nf4", "fp32")
    memory = report["target"]["memory_mb"]
    assert list(memory) == list(PRECISIONS)
    assert memory["fp32"] > memory["bf16"] > memory["int8"] > memory["nf4"]
    assert memory["fp32"] > report["draft"]["memory_mb"]["fp32"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_a_checkpoint_that_is_quantized_already_loads_as_it_is(
    generators: dict[str, SpecStackGenerator], precision: str, tmp_path: Path
) -> None:
    plain = ModelPair.load(device="cpu", precision=precision, prepack_linears=False)
    folder = tmp_path / "stored"
    shutil.copytree(ASSETS / "target", folder, ignore=shutil.ignore_patterns("model.safetensors", "config.json"))
    plain.target.save_pretrained(folder)
    draft = str(ASSETS / "draft")
    generator = SpecStackGenerator.from_pretrained(str(folder), draft, device="cpu")
    assert (generator.pair.precision, generator.pair.draft_precision) == (precision, "fp32")
    prompt = random_prompt(40, vocab=4096)
    results = [
        each.generate(input_ids=prompt, max_tokens=20, gamma=2).token_ids for each in (generators[precision], generator)
    ]
    assert results[0] == results[1]
    assert diagnose(str(folder), draft, "auto", "cpu")["target"]["memory_mb"] == f"as stored ({precision})"

    (folder / "model.safetensors").unlink()
    other = "nf4" if precision == "int8" else "int8"
    for name in (other, "bf16"):
        with pytest.raises(ValueError, match="quantized already"):
            ModelPair.load(str(folder), draft, precision=name, device="cpu")


@pytest.mark.parametrize("missing", ["bitsandbytes", "accelerate"])
@pytest.mark.parametrize("options", [{"precision": "int8"}, {"draft_precision": "nf4"}])
def test_a_missing_package_is_named_before_the_weights_are_read(
    missing: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy_draft(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=rf"needs {missing}, .* pip install '\.\[quantized\]'"):
        ModelPair.load(tmp_path / "model", tmp_path / "model", device="cpu", **options)


def test_devices_and_models_that_cannot_be_quantized_are_refused() -> None:
    config = FAMILIES["llama"]
    with pytest.raises(ValueError, match="works on cpu and cuda, not on 'mps'"):
        resolve_precisions(config, config, LoadConfig("int8"), torch.device("mps"))
    for experts in ("Qwen3-MoE", "GPT-OSS"):
        with pytest.raises(ValueError, match=r"bitsandbytes quantizes linear layers.* \d+% of the layers' weights"):
            resolve_precisions(CONFIGS[experts], config, LoadConfig("int8"), CPU)
    resolve_precisions(config, config, LoadConfig("int8"), CPU)


@pytest.mark.parametrize("name", CONFIGS)
def test_memory_is_foretold_for_every_architecture(name: str) -> None:
    foretold = estimate_bytes(CONFIGS[name], Precision("fp32", torch.float32))
    assert foretold == tiny_architectures.make_model(name).get_memory_footprint(return_buffers=False)


@pytest.mark.parametrize("name", ["Gemma3", "Qwen3.5", "Falcon-H1"])
def test_windows_and_hybrids_run_in_int8(name: str, tmp_path: Path) -> None:
    draft = tiny_architectures.make_model(name)
    draft.save_pretrained(tmp_path)
    options = Precision("int8", torch.float32).load_options(CPU)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    generator = SpecStackGenerator(target, draft)
    result = generator.generate(input_ids=random_prompt(40), gamma=3, max_tokens=12, ignore_eos=True)
    assert (result.metrics.precision, result.metrics.draft_precision) == ("int8", "fp32")
    assert len(result.token_ids) == 12
    assert result.metrics.num_accepted > 0


def test_fp16_on_a_cpu_warns_where_the_pair_is_asked_for() -> None:
    with pytest.warns(match="fp16 prefill is very slow on a CPU") as warned:
        pair = ModelPair.load(device="cpu", precision="fp16")
    assert warned[0].filename == __file__
    assert (pair.target.dtype, pair.draft.dtype) == (DTYPES["fp16"], DTYPES["fp16"])


def test_bitsandbytes_does_not_say_in_every_call_that_it_casts_or_lacks_a_kernel(
    generators: dict[str, SpecStackGenerator], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        generators["int8"].generate(PROMPT, max_tokens=4)
        logging.getLogger("bitsandbytes.backends.cpu.ops").warning(
            "Failed to load CPU gemm_4bit_forward from kernels-community: no network"
        )
        logging.getLogger("bitsandbytes.autograd._functions").warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_requests_leave_quantized_weights_where_they_are(precision: str) -> None:
    """bitsandbytes moves them in the first forward, which must be over before two requests can meet."""
    generator = SpecStackGenerator.from_pretrained(device="cpu", precision=precision)

    def places() -> list[int]:
        layers = [
            layer for layer in generator.target.modules() if type(layer).__name__ in ("Linear8bitLt", "Linear4bit")
        ]
        weights = [layer.state.CB if precision == "int8" else layer.weight for layer in layers]
        assert weights
        return [weight.data_ptr() for weight in weights]

    before = places()
    generator.generate(PROMPT, max_tokens=3)
    assert places() == before


def test_a_precision_without_a_name_is_other_also_in_records(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1))
    precision = precision_of(model.double())
    assert precision == "other"
    records = [step(2, 1, precision=precision)]
    add_records(records, tmp_path / "steps.jsonl")
    assert read_records(tmp_path / "steps.jsonl") == records
    gptq = LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4})
    resolved = resolve_precisions(gptq, LlamaConfig(), LoadConfig(), CPU)
    assert [(each.name, each.is_stored) for each in resolved] == [("other", True), ("fp32", False)]
    with pytest.raises(ValueError, match="quantized already"):
        resolve_precisions(gptq, LlamaConfig(), LoadConfig("bf16"), CPU)
