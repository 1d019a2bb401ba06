"""Questions about one long document: after the first turn only what is new is prefilled. Runs offline.

python examples/chat_loop.py
"""

import argparse
from pathlib import Path

from spec_stack import SpecStackGenerator

QUESTIONS = ("What is the red code for Alice?", "Where does Bruno live?", "What is the red code for Alice?")


def main() -> None:
    generator = SpecStackGenerator.from_pretrained()
    source = Path(argparse.__file__).read_text()[:16_000]
    facts = "\nThe red code for Alice is 48213.\n", "\nBruno lives in Vienna.\n"
    document = source[:5_000] + facts[0] + source[5_000:11_000] + facts[1] + source[11_000:]
    messages: list[dict[str, str]] = []
    with generator.session() as session:
        for question in QUESTIONS:
            content = question if messages else f"{document}\n\n{question}"
            messages.append({"role": "user", "content": content})
            result = session.generate(messages=messages, max_tokens=32)
            messages.append({"role": "assistant", "content": result.text})
            metrics = result.metrics
            print(f"{question} {result.text.strip()}")
            print(
                f"  {metrics.num_new_tokens} new, {metrics.num_cached_tokens} cached, {metrics.num_recalled_tokens} "
                f"recalled; first token after {metrics.ttft_s:.2f} s"
            )


if __name__ == "__main__":
    main()
