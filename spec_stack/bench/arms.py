"""Arms of a live comparison: the generator under a policy, and Transformers' own generate over the same models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import MaxLengthCriteria

from spec_stack.api.generator import SpecStackGenerator
from spec_stack.bench.prompts import Encoded
from spec_stack.bench.rows import Row
from spec_stack.config import DecodeConfig
from spec_stack.controller.base import Policy
from spec_stack.controller.registry import make_policy
from spec_stack.records import add_records

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Clock = Callable[[], float]
Arm = Callable[[Encoded], Row]
"""Answers a prompt greedily: seconds, tokens, steps, and proposed and accepted tokens."""
PLAIN = "plain"
RECORDED = {PLAIN: 0, "fixed 2": 2, "fixed 4": 4, "fixed 8": 8}
"""The arms whose steps are recorded for a replay, with their gamma."""
THEIRS = "Transformers, "
DRAFT_ONLY: Mapping[str, Any] = {"proposer": "model"}
# Transformers sizes a static cache by the longest answer, and a proposal at the answer's end runs beyond it.
_STATIC_ROOM = 16


@dataclass
class Ours:
    """The generator under one policy, which learns from answer to answer.

    options: more of `stream`'s. records: a .jsonl file for the steps.
    """

    generator: SpecStackGenerator
    policy: Policy
    options: Mapping[str, Any]
    num_tokens: int
    clock: Clock = perf_counter
    records: Path | None = None

    def __call__(self, prompt: Encoded) -> Row:
        options: dict[str, Any] = {"sparse_prefill": "draft_only", "max_tokens": self.num_tokens, **self.options}
        options |= {"request_id": prompt.key, "task": prompt.task}
        began = self.clock()
        steps = self.generator.stream(input_ids=prompt.token_ids, policy=self.policy, **options)
        outputs = [next(steps)]
        first_s = self.clock() - began
        outputs += steps
        seconds, metrics = self.clock() - began, outputs[-1].metrics
        if metrics is None:
            raise RuntimeError("the stream ended without a last step")
        if self.records is not None:
            add_records((output.record for output in outputs), self.records)
        return {
            "seconds": seconds,
            "decode_s": seconds - first_s,
            "token_ids": [token for output in outputs for token in output.token_ids],
            "num_steps": metrics.num_steps,
            "num_proposed": metrics.num_proposed,
            "num_accepted": metrics.num_accepted,
        }


@dataclass
class Theirs:
    """Transformers' generate over the same models.

    settings: of the draft's generation configuration; what Transformers adapts there, it keeps from call to call.
    options: more arguments of `generate`.
    """

    target: PreTrainedModel
    num_tokens: int
    draft: PreTrainedModel | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    clock: Clock = perf_counter

    def __post_init__(self) -> None:
        if self.draft is not None:
            self._config = deepcopy(self.draft.generation_config)
            for name, value in self.settings.items():
                setattr(self._config, name, value)

    def __call__(self, prompt: Encoded) -> Row:
        prompt_ids, fed = prompt.token_ids, list[int]()
        hook = self.target.register_forward_pre_hook(
            lambda _, positional, named: fed.append(named["input_ids"].shape[1]), with_kwargs=True
        )
        inputs = torch.tensor([prompt_ids], device=self.target.device)
        if self.draft is not None:
            self.draft.generation_config = self._config
        began = self.clock()
        try:
            output = self.target.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                repetition_penalty=1.0,
                max_new_tokens=self.num_tokens + _STATIC_ROOM,
                stopping_criteria=[MaxLengthCriteria(len(prompt_ids) + self.num_tokens)],
                assistant_model=self.draft,
                **self.options,
            )
            # Reading the tokens waits for the device.
            token_ids = output[0, len(prompt_ids) :].tolist()[: self.num_tokens]
            seconds = self.clock() - began
        finally:
            hook.remove()
        # A forward is fed what is not in the cache, one token or the prompt, and the proposal after it.
        proposed = sum(fed) - len(prompt_ids) - (len(fed) - 1)
        return {
            "seconds": seconds,
            "token_ids": token_ids,
            "num_steps": len(fed),
            "num_proposed": proposed,
            "num_accepted": len(token_ids) - len(fed),
        }


def constant_schedule(num_assistant: int) -> dict[str, Any]:
    """A draft's generation configuration for so many drafted tokens in every step."""
    return {
        "num_assistant_tokens": num_assistant,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def our_arms(
    generator: SpecStackGenerator, policies: Mapping[str, Callable[[], Policy]], num_tokens: int, clock: Clock
) -> dict[str, Callable[..., Arm]]:
    """What makes each arm, given num_tokens or not: plain, default, n-gram lookup, and policies by the draft alone.

    Raises ValueError for a policy that is named as another arm.
    """
    default = partial(make_policy, DecodeConfig().policy)
    arms: dict[str, tuple[Callable[[], Policy], Mapping[str, Any]]] = {
        PLAIN: (partial(make_policy, "fixed", gamma=0), DRAFT_ONLY),
        "default": (default, {"proposer": "both"}),
        "n-gram lookup": (default, {"proposer": "ngram"}),
    }
    for name in policies:
        if name in {*arms, *RECORDED} or name.startswith(THEIRS):
            raise ValueError(f"an arm of its own has the name {name!r}; name your policy otherwise")
    arms |= {name: (make, DRAFT_ONLY) for name, make in policies.items()}

    def arm(make: Callable[[], Policy], options: Mapping[str, Any], *, num_tokens: int) -> Arm:
        return Ours(generator, make(), options, num_tokens, clock)

    return {name: partial(arm, *parts, num_tokens=num_tokens) for name, parts in arms.items()}


def their_arms(generator: SpecStackGenerator, num_tokens: int, clock: Clock) -> dict[str, Callable[..., Arm]]:
    """What makes each of Transformers' arms: assisted generation by its dynamic rule and at constant lengths, and
    prompt lookup."""
    target, draft = generator.target, generator.draft
    assisted = {"dynamic": {}, **{str(count): constant_schedule(count) for count in (3, 5, 10)}}
    own = partial(Theirs, target, num_tokens=num_tokens, clock=clock)
    lookup = {"prompt_lookup_num_tokens": 10}
    return {
        **{
            f"{THEIRS}assisted, {name}": partial(own, draft=draft, settings=settings)
            for name, settings in assisted.items()
        },
        f"{THEIRS}lookup, 10": partial(own, options=lookup),
        f"{THEIRS}lookup, 10 by 3-grams": partial(own, options={**lookup, "max_matching_ngram_size": 3}),
    }
