"""A request from its options in `custom_params` to the report in its reply. No SGLang import.

The scheduler's process attaches the report to the request; the tokenizer's process assembles it from the output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol

from spec_stack.config import PrefillConfig, SparsePrefill
from spec_stack.controller.base import StepRecord
from spec_stack.controller.registry import BATCH_POLICIES
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.prompt_text import union
from spec_stack.settings.checks import plain
from spec_stack.sglang.server_args import FOLLOW_UPS, ServerConfig

KEY = "spec_stack"
"""The key of the options in `custom_params` and of the report in a reply's meta info, and the attribute of SGLang's
objects that holds ours: of a request, once it is decided, its RequestOptions."""
_OF_PREFILL = ("sparse_prefill", "keep_rate", "max_dropped_attention")
_TOO_DEEP = f"custom_params.{KEY} is nested too deeply"
# No other reader of `custom_params` means these.
_OURS_ALONE = (*_OF_PREFILL, "follow_up")
# More than any model's context: a span that ends after it is a mistake.
_MOST_TOKENS = 16_777_216
# More would hold up everybody: they are read on SGLang's tokenizer loop and its scheduler's thread.
_MOST_SPANS = 4096


class RunningRequest(Protocol):
    """`sglang.srt.managers.schedule_batch.Req`: a request inside the scheduler.

    customized_info: lists sent along with the output tokens, entry i with token i. extra_key, cache_salt: the client's
    parts of the radix key. logprob_start_len: the first prompt token with a requested logprob; -1, or the prompt's
    length, for none. sampling_params: SGLang's SamplingParams.
    """

    rid: str
    origin_input_ids: Sequence[int]
    full_untruncated_fill_ids: Sequence[int]
    output_ids: Sequence[int]
    extra_key: str | None
    cache_salt: str | None
    logprob_start_len: int
    priority: int
    customized_info: dict[str, list[Any]] | None
    is_retracted: bool
    sampling_params: Any

    def finished(self) -> bool: ...


@dataclass(frozen=True)
class RequestOptions:
    """A request's options (docs/serving.md); None is the server's default. protect: half-open token spans.

    route, whole, header: the front end's, where it audits: what the request is counted under, why audits leave its
    prompt whole, and the keep rate of its header, where that holds.
    """

    sparse_prefill: SparsePrefill | None = None
    keep_rate: float | None = None
    max_dropped_attention: float | None = None
    follow_up: str | None = None
    protect: tuple[Span, ...] | None = None
    question: str | None = None
    explain: bool | None = None
    gamma: int | None = None
    policy: str | None = None
    route: str | None = field(default=None, compare=False)
    whole: str | None = field(default=None, compare=False)
    header: str | None = field(default=None, compare=False)

    @classmethod
    def parse(cls, custom_params: object, config: ServerConfig) -> RequestOptions:
        """Read the options from `custom_params`' entry KEY, an object or `on_wire`'s text; others are ignored.

        Raises ValueError for an unknown option, for a value of the wrong type or out of range, and for a name that is
        this package's alone outside of the entry.
        """
        try:
            return cls._parse(custom_params, config)
        except RecursionError:
            raise ValueError(_TOO_DEEP) from None

    @classmethod
    def _parse(cls, custom_params: object, config: ServerConfig) -> RequestOptions:
        params: Mapping[str, Any] = custom_params if isinstance(custom_params, Mapping) else {}
        misplaced = [name for name in _OURS_ALONE if params.get(name) is not None]
        if misplaced:
            raise ValueError(f"{', '.join(misplaced)} belongs in custom_params.{KEY}")
        requested = params.get(KEY)
        if requested is None:
            return cls()
        known = OPTIONS
        if isinstance(requested, str):
            known = tuple(entry.name for entry in fields(cls))
            # What a client wrote itself may be any text.
            with suppress(json.JSONDecodeError):
                requested = json.loads(requested)
        if not isinstance(requested, Mapping):
            raise ValueError(f"custom_params.{KEY} must be an object of options, got {requested!r}")
        unknown = [str(name) for name in requested if name not in known]
        if unknown:
            raise ValueError(f"custom_params.{KEY} has no option {', '.join(unknown)}; it has {', '.join(OPTIONS)}")
        given = {name: value for name, value in requested.items() if value is not None}
        values: dict[str, Any] = {
            name: _spans(value) if name == "protect" else plain(value) for name, value in given.items()
        }
        options = cls(**values)
        options._check(config)
        return options

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def on_wire(self) -> str:
        """The options as one string: SGLang's msgpack takes no nested values in `custom_params`, and the scheduler ends
        over others."""
        return json.dumps(self.as_dict())

    def _check(self, config: ServerConfig) -> None:
        def given(*names: str) -> str:
            return ", ".join(name for name in names if getattr(self, name) is not None)

        if not isinstance(self.question, str | None) or (self.question is not None and not self.question.strip()):
            raise ValueError(f"question must be a text, got {self.question!r}")
        if not isinstance(self.explain, bool | None):
            raise ValueError(f"explain must be true or false, got {self.explain!r}")
        # The configuration checks it.
        switch, launched = self.prefill(config).sparse_prefill, config.prefill.sparse_prefill
        is_draft_only = launched == "draft_only"
        if switch not in (("draft_only", "off") if is_draft_only else ("auto", "on", "off")):
            raise ValueError(
                f"sparse_prefill={switch!r} cannot be had on this server, whose draft's slots are settled at launch: "
                f"it was launched with --spec-stack-sparse-prefill {launched}"
            )
        if is_draft_only and (idle := given("keep_rate", "max_dropped_attention", "follow_up")):
            raise ValueError(f"{idle} set how prompts are pruned, and this server prunes its draft alone")
        if self.follow_up not in (None, *FOLLOW_UPS):
            raise ValueError(f"follow_up must be one of {', '.join(FOLLOW_UPS)}, got {self.follow_up!r}")
        if config.scoring_model is not None and (requested := given("gamma", "policy")):
            raise ValueError(f"{requested} set how SPEC_STACK drafts, and on this server it does not")
        if self.gamma is not None:
            if type(self.gamma) is not int or self.gamma not in config.gammas:
                raise ValueError(f"gamma must be one of the server's, {list(config.gammas)}, got {self.gamma!r}")
            if self.policy not in (None, "fixed"):
                raise ValueError("gamma sets the fixed policy; give gamma or another policy, not both")
        if self.policy is not None:
            BATCH_POLICIES.find(self.policy)

    def prefill(self, config: ServerConfig) -> PrefillConfig:
        """The server's prefill configuration with this request's options of it."""
        requested: dict[str, Any] = {name: getattr(self, name) for name in _OF_PREFILL}
        return replace(config.prefill, **{name: value for name, value in requested.items() if value is not None})


OPTIONS = tuple(entry.name for entry in fields(RequestOptions) if entry.compare)
"""A client's."""


def _spans(protect: object) -> tuple[Span, ...]:
    """Sorted, with gaps between them."""
    listed = protect if isinstance(protect, list | tuple) else None
    if listed is None or len(listed) > _MOST_SPANS or not all(map(_is_span, listed)):
        got = f"{len(listed)} entries" if listed is not None and len(listed) > 8 else repr(protect)[:200]
        raise ValueError(
            f"protect must be a list of at most {_MOST_SPANS} token spans [start, stop], "
            f"0 <= start <= stop <= {_MOST_TOKENS}, got {got}"
        )
    return tuple(union((start, stop) for start, stop in listed if start < stop))


def _is_span(span: object) -> bool:
    if not isinstance(span, list | tuple) or len(span) != 2:
        return False
    start, stop = span
    return type(start) is int and type(stop) is int and 0 <= start <= stop <= _MOST_TOKENS


NO_OPTIONS = RequestOptions()


def entry_text(entry: object) -> str:
    """A client's entry KEY as one string. Raises ValueError."""
    try:
        return json.dumps(entry)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def attach(request: RunningRequest, options: RequestOptions, report: Mapping[str, Any]) -> None:
    """Attach the options to SGLang's request, and the report to its reply. Mutates the request.

    Notes
    -----
    `customized_info[key][i]`, the only channel to the tokenizer's process, is sent once, with output token i. After a
    prefill (token 0), a step that drafted 4 and had 2 accepted (tokens 1 to 3), and one that drafted none (token 4)::

        token      0         1       2     3     4
        carried    report    [4, 2]  None  None  [0, 0]

    `ReportAssembler` reassembles them.
    """
    setattr(request, KEY, options)
    request.customized_info = {**(request.customized_info or {}), KEY: [dict(report)]}


def note_step(request: RunningRequest, record: StepRecord) -> None:
    """Put a step's figures at its first token (see `attach`). Mutates the request.

    Called before SGLang appends the step's tokens. It may append fewer (a stop, a limit), and removes tokens at a
    retraction: notes beyond output_ids are corrected here.
    """
    carried = (request.customized_info or {}).get(KEY)
    if carried is None:
        return
    num_out = len(request.output_ids)
    del carried[num_out:]
    carried += [None] * (num_out - len(carried))
    carried += [[record.gamma, record.num_accepted], *[None] * record.num_accepted]


def was_wrong(request: RunningRequest) -> bool:
    """Return whether more than half of the newest known proposal was rejected."""
    carried = (request.customized_info or {}).get(KEY) or []
    gamma, num_accepted = next((figures for figures in reversed(carried[1:]) if figures), (0, 0))
    return 2 * num_accepted < gamma


def dense_reason(request: RunningRequest, has_sessions: bool = False) -> str | None:
    """Why this request's prompt must be prefilled densely, or None. An attribute that SGLang lacks requests nothing.

    has_sessions: `session_id` names one in the radix cache; else routers use it alone.
    """
    if has_sessions and getattr(request, "session_id", None):
        return "the request belongs to a session"
    num_without_logprob = getattr(request, "logprob_start_len", -1)
    if getattr(request, "return_logprob", False) and 0 <= num_without_logprob < len(request.origin_input_ids):
        return "input logprobs were asked for"
    labels = getattr(getattr(request, "logprob", None), "token_ids_logprob", None)
    if labels and request.sampling_params.max_new_tokens == 0:
        return "the prompt is scored by its labels' probabilities"
    reasons = {
        "session": "the request belongs to a session",
        "multimodal_inputs": "the prompt is multimodal",
        "input_embeds": "the prompt is given as embeddings",
        "positional_embed_overrides": "embeddings are replaced by position",
        "multi_item_delimiter_indices": "several items are scored in one prompt",
        "token_indices_to_pool": "prompt tokens are pooled by index",
        "return_hidden_states": "hidden states of the prompt were asked for",
        "return_routed_experts": "the prompt's routed experts were asked for",
        "return_indexer_topk": "the prompt's indexer output was asked for",
        "beam_group": "several beams are searched",
        "lora_id": "a LoRA adapter was asked for",
        "bootstrap_room": "prefill and decode run on different servers",
    }
    return next((reason for name, reason in reasons.items() if getattr(request, name, None)), None)


# In the tokenizer's process


class ReportAssembler:
    """One reply's report, assembled from its tokens' customized_info (see `attach`)."""

    def __init__(self) -> None:
        self._report: dict[str, Any] | None = None
        self._gammas: list[int] = []
        self._accepted: list[int] = []

    def add(self, carried: Sequence[Any]) -> None:
        """Add what came with the next tokens."""
        for item in carried:
            if isinstance(item, Mapping):
                self._report = dict(item)
            elif item is not None:
                gamma, num_accepted = item
                self._gammas.append(gamma)
                self._accepted.append(num_accepted)

    def num_prompt_tokens(self) -> int | None:
        """Of the whole prompt; None without a report."""
        return None if self._report is None else int(self._report["num_prompt_tokens"])

    def meta_info(self, is_finished: bool) -> dict[str, Any] | None:
        """The report with the steps so far, at the end one by one; None without one, no steps without a policy."""
        if self._report is None or "policy" not in self._report:
            return None if self._report is None else dict(self._report)
        counts = {"num_proposed": sum(self._gammas), "num_accepted": sum(self._accepted)}
        steps = {"gamma_trace": list(self._gammas), "accepted_trace": list(self._accepted)} if is_finished else {}
        return {**self._report, **counts, **steps}


def correct_acceptance(meta_info: dict[str, Any], report: Mapping[str, Any]) -> None:
    """Correct what SGLang computes from the widest gamma alone. Mutates meta_info. report: a finished reply's."""
    if "num_proposed" not in report:
        return
    num_proposed, num_accepted = report["num_proposed"], report["num_accepted"]
    num_steps = len(report["gamma_trace"])
    meta_info["spec_num_proposed_drafts"] = num_proposed
    meta_info["spec_num_correct_drafts"] = num_accepted
    meta_info["spec_accept_rate"] = num_accepted / num_proposed if num_proposed else 0.0
    # SGLang divides the output tokens, of which a stop or a limit may have cut some off.
    meta_info["spec_accept_length"] = 1 + num_accepted / num_steps if num_steps else 1.0
