"""Text as it is made, one step of the target at a time, with what the draft had accepted.

python examples/streaming.py
"""

from spec_stack import SamplingParams, SpecStackGenerator


def main() -> None:
    generator = SpecStackGenerator.from_pretrained()
    params = SamplingParams(max_tokens=60, temperature=0.7, top_p=0.9, seed=1)
    for step in generator.stream("Once upon a time", params=params):
        # Text may lag behind the tokens by half a character, or by what could become a stop string.
        print(step.text, end="", flush=True)
    metrics = step.metrics
    print(f"\n\n{metrics.num_tokens} tokens in {metrics.num_steps} steps, because of: {step.finish_reason}")
    print(f"drafted per step: {metrics.gamma_trace}; accepted: {metrics.num_accepted}")


if __name__ == "__main__":
    main()
