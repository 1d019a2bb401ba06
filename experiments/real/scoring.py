"""Pass a draft over prompts, once each: every selection rule is then judged without another pass.

`Scorer.look` gives what the scoring queries of a prompt, and those of a look-ahead, attended to; `kept_positions` and
`Ranked` say what a rule keeps of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments.real.evidence_prompts import EvidencePrompt
from spec_stack import PrefillConfig
from spec_stack.calibrate.judged import open_prompt
from spec_stack.calibrate.prompts import EncodedHaystack, encode_evidence
from spec_stack.cli.arguments import window
from spec_stack.config import ScoringQueries
from spec_stack.decode.proposer import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.calibration import Calibration
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.queries import find_candidates
from spec_stack.prefill.registry import make_rule, needs_attention
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.scoring import run_draft
from spec_stack.prefill.segments import Segments, make_segments
from spec_stack.prefill.selection import select
from spec_stack.tokenizers.prompt_reader import PromptReader
from spec_stack.types import Proposal

Looks = Mapping[ScoringQueries, CapturedAttention]


@dataclass(frozen=True)
class Encoded:
    """A prompt in the target's tokens, and where the evidence is."""

    text: PromptText
    spans: Sequence[Span] = ()

    @property
    def token_ids(self) -> Sequence[int]:
        return self.text.token_ids

    @property
    def pieces(self) -> Sequence[str] | None:
        return self.text.pieces


def encode(tokenizer: Any, prompt: EvidencePrompt) -> Encoded:
    """Render a prompt's messages, and find its parts among the tokens: the evidence, then the hops' answers."""
    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    spans = [*prompt.spans, *(span for hop in prompt.hops for span in hop)]
    made = encode_evidence(tokenizer, messages, prompt.document, spans)
    return Encoded(PromptReader(tokenizer).with_pieces(made.text), made.spans)


@dataclass(frozen=True)
class Scorer:
    """A draft beside its target's tokenizer, without the target's weights. window: as `PrefillConfig.draft_window`."""

    pair: ModelPair
    index: CachedModel
    window: int | tuple[int, int] | None = None

    @classmethod
    def load(cls, arguments: argparse.Namespace) -> Scorer:
        """The pair that `add_scorer_arguments` asks for."""
        torch.set_num_threads(arguments.threads)
        precision = arguments.precision
        pair = ModelPair.load(
            arguments.target, arguments.draft, precision=precision, draft_precision=precision, target_weights=False
        )
        return cls(pair, pair.new_draft_cache(PrefillConfig.prefill_chunk), arguments.draft_window)

    def look(self, encoded: Encoded, queries: Collection[ScoringQueries] = ("prompt", "look_ahead")) -> Looks:
        """Pass the draft over what a prompt does not share with the one before it. queries: of which to score."""
        if not queries:
            return {}
        pair = self.pair
        tokenization, problem = pair.tokenize_for_draft(encoded.token_ids)
        if problem:
            raise ValueError(f"the draft cannot score prompts: {problem}")
        draft = open_prompt(pair, self.index, EncodedHaystack(encoded.text, (), tokenization))

        def look_ahead(committed_ids: Sequence[int], num_tokens: int) -> Proposal:
            return propose(draft, committed_ids, num_tokens, Sampler(), pair.end_ids)

        looks: dict[ScoringQueries, CapturedAttention] = {}
        for config in (PrefillConfig(), PrefillConfig.full_look_ahead()):
            if config.scoring_queries not in queries:
                continue
            looks[config.scoring_queries], _ = run_draft(
                draft,
                ScoringInputs(encoded.text),
                look_ahead,
                replace(config, draft_window=self.window),
                tokenization,
            )
        return looks


def evidence_of(encoded: Encoded, looks: Looks, config: PrefillConfig) -> ScoringInputs:
    """What a rule scores by."""
    attention = looks[config.scoring_queries] if needs_attention(config.scorer) else None
    return ScoringInputs(encoded.text, attention)


def kept_positions(encoded: Encoded, looks: Looks, config: PrefillConfig) -> Sequence[int]:
    """The tokens of a prompt that a rule keeps."""
    evidence = evidence_of(encoded, looks, config)
    if evidence.attention is not None:
        evidence = replace(evidence, importance=evidence.attention.importance(config))
    return select(evidence, config).positions


@dataclass(frozen=True)
class Ranked:
    """A prompt's segments with scores, of which any share can be kept."""

    encoded: Encoded
    config: PrefillConfig
    segments: Segments
    scores: torch.Tensor

    @classmethod
    def by_rule(cls, encoded: Encoded, looks: Looks, config: PrefillConfig) -> Ranked:
        segments = make_segments(len(encoded.token_ids), encoded.pieces, config)
        scores = make_rule(config.scorer).score(evidence_of(encoded, looks, config), segments, config)
        return cls(encoded, config, segments, scores)

    @classmethod
    def by_age(cls, encoded: Encoded) -> Ranked:
        """The newest lines first."""
        segments = make_segments(len(encoded.token_ids), encoded.pieces, config := PrefillConfig())
        return cls(encoded, config, segments, torch.arange(len(segments), dtype=torch.float))

    @classmethod
    def by_chance(cls, encoded: Encoded, seed: int) -> Ranked:
        """Lines in random order."""
        segments = make_segments(len(encoded.token_ids), encoded.pieces, config := PrefillConfig())
        return cls(encoded, config, segments, torch.rand(len(segments), generator=torch.Generator().manual_seed(seed)))

    def kept(self, keep_rate: float) -> set[int]:
        """The tokens that are kept at such a share."""
        protected = {at for start, stop in self.encoded.text.kept for at in range(start, stop)}
        asking = find_candidates(self.encoded.text).asking_tokens
        return self.segments.chosen(self.scores, self.config, keep_rate, protected, asking) | protected


def calibrated(path: Path) -> PrefillConfig:
    """A calibration's rule without its window, which is a setting of its own."""
    return replace(Calibration.load(path).apply(), draft_window=None)


def measure_with(tokenizer: Any) -> Callable[[str], int]:
    """Counts the tokens of a text."""
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def add_scorer_arguments(parser: argparse.ArgumentParser, precision: str = "bf16") -> None:
    """A pair of which the draft scores, and the rule beside the default one."""
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--draft", type=Path, required=True, help="folder of the draft")
    parser.add_argument("--calibration", type=Path, help="a calibration's file or folder")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default=precision)
    parser.add_argument("--draft-window", type=window, metavar="[SHORTEST:]WINDOW", help="of the draft's passes")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (%(default)s)")


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Prompts with known evidence."""
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--num-tokens", type=int, default=2048, help="length of the prompts, about (%(default)s)")
    parser.add_argument("--documents", type=int, default=24, help="of prompts in shapes, so many (%(default)s)")
    parser.add_argument("--seed", type=int, default=29, help="what the prompts are drawn by (%(default)s)")
    parser.add_argument("--limit", type=int, default=10**9, help="most prompts of a call")
