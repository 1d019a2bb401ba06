"""A fact hidden in a long document, found by prefilling a fifth of it. Runs offline, on the embedded pair.

python examples/quickstart.py
"""

import argparse
from pathlib import Path

from spec_stack import SpecStackGenerator


def main() -> None:
    generator = SpecStackGenerator.from_pretrained()
    document = Path(argparse.__file__).read_text()[:24_000]
    document = document[:12_000] + "\nThe red code for Alice is 48213.\n" + document[12_000:]
    question = {"role": "user", "content": f"{document}\n\nWhat is the red code for Alice?"}
    for keep_rate in (1.0, 0.2):
        result = generator.generate(messages=[question], keep_rate=keep_rate)
        metrics = result.metrics
        print(f"{metrics.num_kept_tokens} of {metrics.num_prompt_tokens} prompt tokens: {result.text}")
        print(f"  first token after {metrics.ttft_s:.2f} s; {metrics.sparse_prefill_reason}")


if __name__ == "__main__":
    main()
