"""What an import of the package leaves out: a property of the modules, where a time would be one of the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Of torch and transformers: what loading a model needs. Of others: what an extra, or an experiment, brings.
HEAVY = (
    *("transformers.modeling_utils", "transformers.masking_utils", "transformers.generation.utils"),
    *("transformers.models.auto.modeling_auto", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"),
    *("sympy", "scipy", "sklearn", "pandas", "pyarrow", "matplotlib", "bitsandbytes", "accelerate", "peft", "fastapi"),
    *("uvicorn", "openai", "prometheus_client", "llguidance", "outlines"),
)


def loaded_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split("\n")[-2].split(" "))


@pytest.mark.slow
def test_importing_names_loads_nothing_that_only_a_loaded_model_needs() -> None:
    modules = loaded_by("from spec_stack import SpecStackGenerator, Session, SamplingParams, StepOutput")
    assert "spec_stack" in modules
    assert not modules & set(HEAVY)


def test_importing_the_package_or_asking_for_help_loads_no_torch() -> None:
    assert "torch" not in loaded_by("import spec_stack")
    assert "torch" not in loaded_by(
        "from spec_stack.cli.main import main; from spec_stack.cli.arguments import build_parser; build_parser()"
    )


@pytest.mark.slow
@pytest.mark.nightly
def test_loading_a_model_does_need_what_was_left_out() -> None:
    # Else the list above would be of modules that nothing imports.
    modules = loaded_by("from spec_stack.engine.pair import ModelPair; ModelPair.load(device='cpu')")
    assert {"transformers.modeling_utils", "transformers.masking_utils", "torch.distributed.tensor"} <= modules
