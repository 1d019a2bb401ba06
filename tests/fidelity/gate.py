"""Quality gate of selection: 20 committed prompts over the embedded pair, against the recorded losses of its calibrated
rule. `python -m tests.fidelity.gate` records them anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from spec_stack import FidelityReport, PrefillConfig, SpecStackConfig, SpecStackGenerator, measure_fidelity
from spec_stack.bench.fidelity import Interval, mean_interval

FOLDER = Path(__file__).parent
PROMPTS, EXPECTED = FOLDER / "prompts.jsonl", FOLDER / "expected.json"
_KEEP_RATE, _ANSWER_TOKENS = 0.3, 6


def measure(pair: SpecStackGenerator, scorer: str = PrefillConfig.scorer, count: int | None = None) -> FidelityReport:
    """The first prompts under a selection rule, by a calibrated pair. The prompts are short, so one chunk at the end is
    kept, not two."""
    prefill = replace(pair.config.prefill, scorer=scorer, keep_rate=_KEEP_RATE, keep_last=1, on_scoring_failure="raise")
    config = SpecStackConfig(prefill)
    generator = SpecStackGenerator(pair.target, pair.draft, pair.tokenizer, config=config)
    prompts = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    return measure_fidelity(generator, prompts[:count], [_KEEP_RATE], max_tokens=_ANSWER_TOKENS)


def losses(report: FidelityReport) -> list[float]:
    """Nats per token that each prompt loses."""
    return [row.lost(f"{_KEEP_RATE:g}") for row in report.prompts]


def increase(found: Sequence[float], expected: Sequence[float]) -> Interval:
    """How much more is lost than expected, paired; the gate fails where the whole interval is over 0."""
    return mean_interval([ours - theirs for ours, theirs in zip(found, expected, strict=True)])


def main() -> None:
    torch.set_num_threads(1)
    pair = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32")
    found = [round(loss, 4) for loss in losses(measure(pair))]
    EXPECTED.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
