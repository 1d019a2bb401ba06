"""A rule of one's own for how far the draft runs ahead, next to the default.

python examples/own_policy.py
"""

from dataclasses import dataclass

from spec_stack import DraftSignals, Policy, SpecStackGenerator, StepContext


@dataclass
class CautiousAfterRejection(Policy):
    """Draft `few` tokens after a step with a rejection, `many` after one without; stop where the draft is in doubt."""

    few: int = 2
    many: int = 8
    doubt_bits: float = 3.0
    name = "cautious"

    def choose(self, context: StepContext) -> int:
        last = context.last
        return self.few if last is not None and last.num_accepted < last.gamma else self.many

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return signals.entropy[-1] < self.doubt_bits


def main() -> None:
    generator = SpecStackGenerator.from_pretrained()
    for policy in (CautiousAfterRejection(), "throughput", "fixed"):
        # All by the draft alone: by default "throughput" has n-gram lookup too.
        result = generator.generate("def main(argv):\n", max_tokens=64, policy=policy, proposer="model")
        metrics = result.metrics
        print(f"{metrics.policy:10s} {metrics.num_steps:3d} steps, drafted {metrics.gamma_trace}")


if __name__ == "__main__":
    main()
