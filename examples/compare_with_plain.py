"""The same greedy tokens as transformers' `generate`, sooner. The embedded pair, in fp32.

python examples/compare_with_plain.py
"""

from time import perf_counter

import torch

from spec_stack import SpecStackGenerator


def main() -> None:
    generator = SpecStackGenerator.from_pretrained(precision="fp32", device="cpu")
    prompt = "def read_lines(path):\n"
    ids = torch.tensor([generator.tokenizer(prompt).input_ids])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 96, "do_sample": False}
    for is_warm in (False, True):
        started = perf_counter()
        plain = generator.target.generate(ids, **options)[0, ids.shape[1] :].tolist()
        plain_s, started = perf_counter() - started, perf_counter()
        result = generator.generate(prompt, max_tokens=96)
        ours_s = perf_counter() - started
        if is_warm:
            print(f"transformers {len(plain) / plain_s:.0f} tokens/s, spec_stack {len(result.token_ids) / ours_s:.0f}")
    print("the same tokens:", result.token_ids == plain)


if __name__ == "__main__":
    main()
