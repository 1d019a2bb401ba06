"""An agent whose tools return thousands of tokens: every result is pruned by itself, and stays. Runs offline.

python examples/agent.py
"""

import argparse
import tarfile
import zipfile
from pathlib import Path

from spec_stack import SpecStackGenerator

SYSTEM = "You read files and answer questions about them."


def read_file(module: object, fact: str) -> str:
    """The tool: half of a file, with a fact in the middle."""
    text = Path(str(vars(module)["__file__"])).read_text()[:12_000]
    return f"{text[:6_000]}\n{fact}\n{text[6_000:]}"


def main() -> None:
    generator = SpecStackGenerator.from_pretrained()
    messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    steps = ((argparse, "Alice", "48213"), (tarfile, "Bruno", "20984"), (zipfile, "Carla", "77120"))
    with generator.session() as session:
        for module, name, code in steps:
            result = read_file(module, f"The red code for {name} is {code}.")
            messages.append({"role": "tool", "content": result})
            messages.append({"role": "user", "content": f"What is the red code for {name}?"})
            answer = session.generate(messages=messages, max_tokens=32)
            messages.append({"role": "assistant", "content": answer.text})
            metrics = answer.metrics
            print(f"{metrics.num_new_tokens} new of {metrics.num_prompt_tokens} tokens: {answer.text}")
            print(f"  the target holds {metrics.num_kept_tokens}; {metrics.sparse_prefill_reason}")


if __name__ == "__main__":
    main()
