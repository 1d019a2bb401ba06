from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Mamba2Config,
    NemotronHConfig,
)

from spec_stack import PrefillConfig, SpecStackGenerator
from spec_stack.cli.doctor import diagnose
from spec_stack.config import HubConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.loading import ASSETS, resolve_pair
from tests.support.folders import TOKENIZER_FILES
from tests.support.models import make_model
from tests.support.tiny_architectures import HAS_OLD_STATES

OLD_STATES = "keeps the state of its layers in an older way; install 5.24"


def test_a_pair_loads_from_local_folders(folders: tuple[Path, Path]) -> None:
    generator = SpecStackGenerator.from_pretrained(*folders, device="cpu")
    result = generator.generate("def main():", max_tokens=12, proposer="model")
    assert result.metrics.precision == "fp32"
    assert result.metrics.acceptance_rate == 1.0


def test_a_draft_folder_without_a_tokenizer_has_the_targets(folders: tuple[Path, Path]) -> None:
    for name in TOKENIZER_FILES:
        (folders[1] / name).unlink()
    generator = SpecStackGenerator.from_pretrained(*folders, device="cpu")
    assert generator.pair.vocabulary.relation == "same"
    assert diagnose(str(folders[0]), str(folders[1]), "auto", "cpu")["draft"]["tokenizer"] == "the target's"
    (folders[0] / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="cannot load the tokenizer"):
        SpecStackGenerator.from_pretrained(*folders, device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "no/such/folder", "draft": "no/such/folder"}, "neither a folder nor a hub id"),
        ({"target": "./missing", "draft": "./missing"}, "neither a folder nor a hub id"),
        ({"target": "owner/not-cached", "draft": "owner/not-cached"}, "cannot read the model configuration"),
        ({"target": str(ASSETS / "target")}, "no draft given"),
        ({"draft": str(ASSETS / "draft")}, "no target given"),
        ({"target": str(ASSETS), "draft": str(ASSETS)}, "cannot read the model configuration"),
        ({"precision": "int3"}, "unknown precision 'int3'"),
        ({"policy": "clever"}, "unknown policy"),
        ({"target": "no/such/folder", "draft": "no/such/folder", "draft_step": "graph"}, "draft_step must be one of"),
        ({"device": "abacus"}, "cannot be used here"),
        ({"device": "cpu", "device_map": "auto"}, "device or device_map"),
        ({"config": PrefillConfig()}, "config must be a SpecStackConfig"),
        ({"config": {"prefill": {}}}, "config must be a SpecStackConfig"),
    ],
)
def test_a_bad_argument_is_a_value_error_that_says_so(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpecStackGenerator.from_pretrained(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for CUDA where there is none")
def test_cuda_without_a_card_is_refused() -> None:
    with pytest.raises(ValueError, match="'cuda' cannot be used here"):
        ModelPair.load(device="cuda")


def test_a_tokenizer_without_offsets_is_refused_before_the_weights_are_read(folders: tuple[Path, Path]) -> None:
    (folders[1] / "tokenizer.json").unlink()
    (folders[1] / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    (folders[0] / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no character offsets"):
        ModelPair.load(*folders)


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("role", "values", "message"),
    [
        *((role, {"intermediate_size": 520}, "cannot load the weights") for role in (0, 1)),
        *((role, {"vocab_size": 4160}, "cannot load the weights") for role in (0, 1)),
        *((role, {"num_key_value_heads": 1}, "cannot load the weights") for role in (0, 1)),
        (1, {"num_hidden_layers": 9}, r"lacks \d+ weights of its configuration: .*layers"),
        (1, {"tie_word_embeddings": False}, r"lacks \d+ weights of its configuration: "),
    ],
)
def test_weights_that_do_not_fit_the_configuration_are_refused(
    folders: tuple[Path, Path], role: int, values: dict[str, object], message: str
) -> None:
    edit(folders[role] / "config.json", **values)
    with pytest.raises(ValueError, match=message):
        ModelPair.load(*folders, device="cpu")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("target/model.safetensors", b"not weights", "cannot load the weights"),
        ("target/model.safetensors", None, "cannot load the weights"),
        ("model.gguf", b"GGUF\3\0", "cannot read the model configuration"),
        ("model.gguf", None, "neither a file"),
        ("owner/model.gguf", None, "neither a file"),
        ("model.bin", b"", "the folder"),
    ],
)
def test_missing_and_damaged_files_are_refused_by_what_they_lack(
    folders: tuple[Path, Path], tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        ModelPair.load(folders[0] if "target" in name else tmp_path / name, folders[1], device="cpu")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ids", [[[2]], "2", [2.0], {"a": 1}, [None], True])
def test_ends_of_a_text_that_are_no_token_ids_are_refused(folders: tuple[Path, Path], name: str, ids: object) -> None:
    file = folders[0] / name
    if not file.is_file():
        file.write_text("{}")
    edit(file, eos_token_id=ids)
    with pytest.raises(ValueError, match="eos_token_id"):
        ModelPair.load(*folders, device="cpu")


def test_the_embedded_pair_is_the_default_and_hub_ids_pass_through() -> None:
    assert resolve_pair(None, None) == (str(ASSETS / "target"), str(ASSETS / "draft"))
    assert resolve_pair("org/big", "org/small-1.5B") == ("org/big", "org/small-1.5B")


def test_the_doctor_reports_a_healthy_and_a_broken_pair(folders: tuple[Path, Path]) -> None:
    healthy = diagnose(None, None, "auto", "cpu")
    assert healthy["problem"] is None
    assert healthy["packages"]["torch"]
    path = folders[1] / "config.json"
    path.write_text(Mamba2Config().to_json_string())
    assert "not among those" in diagnose(str(folders[0]), str(folders[1]), "auto", "cpu")["problem"]
    assert "unknown precision" in diagnose(None, None, "int3", "cpu")["problem"]


def test_the_doctor_says_what_is_exact_approximate_and_refused(folders: tuple[Path, Path]) -> None:
    assert set(diagnose(None, None, "auto", "cpu")["support"].values()) >= {"exact"}
    for folder in folders:
        (folder / "config.json").write_text(NemotronHConfig(vocab_size=4096).to_json_string())
    hybrid = diagnose(*map(str, folders), "auto", "cpu")
    support = hybrid["support"]
    if HAS_OLD_STATES:
        assert OLD_STATES in hybrid["problem"]
        assert OLD_STATES in support["the draft scores prompts"]
    else:
        assert hybrid["problem"] is None
        assert support["the draft scores prompts"].startswith("approximate (transformers")
        assert support["the target prefills sparsely"].startswith("approximate (Mamba-2 layers")
        assert support["the target decodes speculatively"].startswith("approximate (transformers")
        assert support["the draft's context after a sparse prefill"].startswith("the whole prompt")
    (folders[1] / "config.json").write_text(Mamba2Config(vocab_size=4096).to_json_string())
    assert diagnose(*map(str, folders), "auto", "cpu")["support"]["the draft scores prompts"].startswith("refused (")


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_a_device_map_goes_to_transformers_and_nothing_is_prepacked(device_map: str | dict[str, str]) -> None:
    pytest.importorskip("accelerate")
    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("auto is CUDA here")
    generator = SpecStackGenerator.from_pretrained(device_map=device_map, precision="fp32")
    expected = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", prepack_linears=False)
    options = {"max_tokens": 12, "gamma": 4}
    assert (
        generator.generate("def main():", **options).token_ids == expected.generate("def main():", **options).token_ids
    )
    assert all(
        type(module) is torch.nn.Linear for module in generator.target.modules() if hasattr(module, "in_features")
    )


def test_hub_options_reach_transformers_by_role() -> None:
    hub = HubConfig(revision="v1", draft_revision="v2", token="secret", trust_remote_code=True)
    assert hub.options("target") == {"revision": "v1", "token": "secret", "trust_remote_code": True}
    assert hub.options("draft")["revision"] == "v2"
    assert HubConfig().options("draft") == {"trust_remote_code": False}
    assert "secret" not in repr(hub)
    # A folder has one revision only, so this loads.
    assert SpecStackGenerator.from_pretrained(device="cpu", revision="main", trust_remote_code=False).tokenizer


def test_a_model_in_training_is_put_into_evaluation() -> None:
    target, draft = make_model(seed=1).train(), make_model(seed=2).train()
    SpecStackGenerator(target, draft)
    assert not any(module.training for model in (target, draft) for module in model.modules())


@pytest.fixture
def adapter(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A LoRA adapter, far from zero, on the target folder."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folders[0]), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapters_folder_is_its_base_with_the_adapter_merged(folders: tuple[Path, Path], adapter: Path) -> None:
    import peft

    assert not (adapter / "config.json").exists()
    generator = SpecStackGenerator.from_pretrained(adapter, folders[1], device="cpu", precision="fp32")
    ids = torch.tensor([generator.tokenizer("def main():").input_ids])
    base = AutoModelForCausalLM.from_pretrained(folders[0])
    options = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    plain = base.generate(ids, **options)[0, ids.shape[1] :].tolist()
    adapted = (
        peft.PeftModel.from_pretrained(base, adapter).generate(input_ids=ids, **options)[0, ids.shape[1] :].tolist()
    )
    assert adapted != plain
    assert generator.generate("def main():", max_tokens=16, ignore_eos=True).token_ids[: len(adapted)] == adapted


@pytest.mark.parametrize("config", ['{"peft_type": "LORA"}', '{"base_model_name_or_path": "./gone"}', "{"])
def test_an_adapter_that_cannot_be_read_or_has_no_base_here_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, config: str
) -> None:
    pytest.importorskip("peft")
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(ValueError, match="cannot read the model configuration" + ".*gone" * ("gone" in config)):
        ModelPair.load(tmp_path, folders[1])
