"""lm_eval with this model registered, for releases that ignore entry points (e.g. 0.4.13)."""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry

NAME = "spec_stack"


def main() -> None:
    if NAME not in model_registry:
        model_registry.register(NAME, target="spec_stack.lm_eval.harness_model:SpecStackLM")
    cli_evaluate()


if __name__ == "__main__":
    main()
