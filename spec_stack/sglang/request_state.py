"""What one request asks for through `custom_params`, what is done about it, and what its reply says. No SGLang here."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from spec_stack.config import PrefillConfig
from spec_stack.sglang.positions import PositionMap
from spec_stack.sglang.protocols import RunningRequest, TokenizedRequest
from spec_stack.sglang.server_args import BATCH_POLICIES, ServerConfig

META_INFO = "spec_stack"
"""The key of a reply's meta info, and of what SGLang carries there token by token."""
STATE = "spec_stack"
"""The attribute of SGLang's requests that holds their RequestState."""
OPTIONS = ("specprefill", "keep_rate", "gamma", "policy")


@dataclass(frozen=True)
class RequestOptions:
    """A request's own wishes; None is the server's way.

    specprefill: prune this prompt (True: whatever its length), or do not. keep_rate: share the target reads.
    gamma, policy: how far to draft, as far as a batch allows: see `BatchPolicy`.
    """

    specprefill: bool | None = None
    keep_rate: float | None = None
    gamma: int | None = None
    policy: str | None = None

    @classmethod
    def parse(cls, custom_params: object, config: ServerConfig) -> RequestOptions:
        """Read the options out of `custom_params`, whose other entries are somebody else's.

        Raises ValueError for a value of the wrong type or out of range.
        """
        if not isinstance(custom_params, Mapping):
            return cls()
        options = cls(**{name: custom_params[name] for name in OPTIONS if custom_params.get(name) is not None})
        if not isinstance(options.specprefill, bool | None):
            raise ValueError(f"specprefill must be true or false, got {options.specprefill!r}")
        if options.keep_rate is not None:
            replace(config.prefill, keep_rate=options.keep_rate)
        if options.gamma is not None:
            if type(options.gamma) is not int or options.gamma not in config.gammas:
                raise ValueError(f"gamma must be one of the server's, {list(config.gammas)}, got {options.gamma!r}")
            if options.policy not in (None, "fixed"):
                raise ValueError("gamma sets the fixed policy; give gamma or another policy, not both")
        if options.policy is not None and (not isinstance(options.policy, str) or options.policy not in BATCH_POLICIES):
            raise ValueError(f"policy must be one of {', '.join(BATCH_POLICIES)}, got {options.policy!r}")
        return options

    def prefill(self, config: ServerConfig) -> PrefillConfig:
        """The server's prefill configuration with this request's keep_rate."""
        return config.prefill if self.keep_rate is None else replace(config.prefill, keep_rate=self.keep_rate)


@dataclass(frozen=True)
class PrefillReport:
    """How a prompt was prefilled; the names are those of the library's own metrics."""

    num_prompt_tokens: int
    num_kept_tokens: int
    num_scored_tokens: int
    specprefill: bool
    specprefill_reason: str
    keep_rate: float
    scoring_s: float
    policy: str


@dataclass(frozen=True)
class RequestState:
    """What travels with a request inside the scheduler, and ends with it. positions is None for a dense prompt."""

    options: RequestOptions
    report: PrefillReport
    positions: PositionMap | None = None


def options_of(request: RunningRequest) -> RequestOptions:
    """What the request asked for; nothing, where it carries no state."""
    state = getattr(request, STATE, None)
    return state.options if isinstance(state, RequestState) else RequestOptions()


def attach(request: RunningRequest, state: RequestState) -> None:
    """Give SGLang's request its state, and its report a place in the reply. Mutates the request.

    Notes
    -----
    The tokenizer's process, which writes replies, has nothing of the scheduler's but what SGLang carries along with
    the tokens: `customized_info[key][i]` goes out with output token i, and every entry goes out once. So the report
    lies at token 0, and a step's [gamma, num_accepted] at the step's first token. After a prefill (token 0), a step
    that drafted 4 and had 2 accepted (tokens 1 to 3), and one that drafted none (token 4)::

        token      0         1       2     3     4
        carried    report    [4, 2]  None  None  [0, 0]

    `ReplyInfo` adds them up again on the other side.
    """
    setattr(request, STATE, state)
    request.customized_info = {**(request.customized_info or {}), META_INFO: [asdict(state.report)]}


def note_step(request: RunningRequest, gamma: int, num_accepted: int) -> None:
    """Put a step's figures where its first token is about to be (see `attach`). Mutates the request.

    Called before SGLang appends the step's num_accepted + 1 tokens to output_ids. SGLang may append fewer (a stop, a
    limit) and takes tokens away from a request that it retracts: what was noted for those is put right here.
    """
    carried = (request.customized_info or {}).get(META_INFO)
    if carried is None:
        return
    num_out = len(request.output_ids)
    del carried[num_out:]
    carried += [None] * (num_out - len(carried))
    carried += [[gamma, num_accepted], *[None] * num_accepted]


class ReplyInfo:
    """What a reply says under META_INFO, put together from what came with its tokens."""

    def __init__(self) -> None:
        self._report: dict[str, Any] | None = None
        self._gammas: list[int] = []
        self._num_proposed = self._num_accepted = 0

    def add(self, carried: Sequence[Any]) -> None:
        """Take in what came with the next tokens."""
        for item in carried:
            if isinstance(item, Mapping):
                self._report = dict(item)
            elif item is not None:
                gamma, num_accepted = item
                self._gammas.append(gamma)
                self._num_proposed += gamma
                self._num_accepted += num_accepted

    def meta_info(self, is_finished: bool) -> dict[str, Any] | None:
        """The report with the steps so far, and at the end with every step's gamma; None where none has come."""
        if self._report is None:
            return None
        trace = {"gamma_trace": self._gammas} if is_finished else {}
        return {**self._report, "num_proposed": self._num_proposed, "num_accepted": self._num_accepted, **trace}


def namespace(kept: Sequence[int], num_prompt_tokens: int) -> str:
    """A radix-cache namespace: KV computed over a selection serves that selection, and no full prefix, ever."""
    digest = hashlib.sha256(array("q", [num_prompt_tokens, *kept]).tobytes()).hexdigest()
    return f"|spec_stack:{digest[:32]}"


def dense_reason(request: TokenizedRequest) -> str | None:
    """Why this request's prompt must be prefilled densely, or None.

    request: SGLang's tokenized request. Its attributes differ between versions: an absent one asks for nothing.
    """
    if getattr(request, "return_logprob", False) and getattr(request, "logprob_start_len", -1) not in (-1, None):
        return "input logprobs were asked for"
    reasons = {
        "session_params": "the request belongs to a session",
        "session_id": "the request belongs to a session",
        "mm_inputs": "the prompt is multimodal",
        "input_embeds": "the prompt is given as embeddings",
        "positional_embed_overrides": "embeddings are replaced by position",
        "multi_item_delimiter_indices": "several items are scored in one prompt",
        "token_indices_to_pool": "prompt tokens are pooled by index",
        "return_hidden_states": "hidden states of the prompt were asked for",
        "return_routed_experts": "the prompt's routed experts were asked for",
        "return_indexer_topk": "the prompt's indexer output was asked for",
        "bootstrap_room": "prefill and decode run on different servers",
    }
    return next((reason for name, reason in reasons.items() if getattr(request, name, None)), None)
