"""Pruner: shortens messages for any engine, with a draft alone."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from spec_stack.api.generator import calibrated
from spec_stack.api.pruned_text import Text, cut_segments, protected_spans, whole_segments, write_spans
from spec_stack.api.unknown_options import refuses_unknown_options
from spec_stack.config import LoadConfig, PrefillConfig, SessionConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.progress import OnProgress, Progress, RequestCancelled
from spec_stack.hf.chat_template import KEPT_ROLES, chat_parts, checked_message
from spec_stack.hf.loading import ASSETS, load_tokenizer, name_of_model, open_alone
from spec_stack.hf.prompt import Message, num_shared, readable
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.check import told
from spec_stack.prefill.prompt_text import ChatTurn, PromptText, clip_spans
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.scoring import gather_inputs
from spec_stack.prefill.segments import find_lines
from spec_stack.prefill.turn import Cached, NeedsScore, Plan, plan_scored, plan_turn, scoring_obstacle
from spec_stack.settings.checks import plain, require_config
from spec_stack.types import Selection, TriedRate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from spec_stack.hf.model import CachedModel

Prunable = str | Sequence[Message]
# A content part's index (None: the content is a string) and its text.
_Part = tuple[int | None, str]
# Separates a message's texts.
_JOINT = "\n"
# Most attempts to fit a selection into max_tokens, and the share of it that may be left.
_MOST_TRIES, _UNUSED = 8, 0.02


@dataclass(frozen=True)
class KeptText:
    """The kept part of one text.

    Parameters
    ----------
    message : int
        Index of its message; 0 for a plain text.
    part : int or None
        Index of its content part; None where the content is a string.
    spans : list of (int, int)
        Half-open spans of its characters, in order.
    """

    message: int
    part: int | None
    spans: list[Span]


@dataclass(frozen=True)
class PruneResult:
    """A shorter prompt.

    Parameters
    ----------
    messages : str or list of dict
        In the given format: a text, or messages in which only the texts are shorter.
    kept : list of KeptText
        The kept spans of each text.
    num_tokens, num_kept_tokens : int
        Tokens of the whole and of the pruned prompt, by the draft's tokenizer, chat template included.
    num_recalled_tokens : int
        Kept tokens that an earlier turn of the conversation had dropped.
    reason : str
        Why the prompt was pruned or not.
    tried_rates : list of TriedRate
        What the draft's check tried, in order.
    """

    messages: Any
    kept: list[KeptText]
    num_tokens: int
    num_kept_tokens: int
    num_recalled_tokens: int
    reason: str
    tried_rates: list[TriedRate] = field(default_factory=list)

    @property
    def dropped_attention(self) -> float | None:
        """Share of the draft's attention that the check's last try drops; None without a check."""
        return self.tried_rates[-1].dropped_attention if self.tried_rates else None


@dataclass(frozen=True)
class _Prompt:
    """A prompt to score, and the texts of its messages. parts: the template's texts and the messages' indices."""

    parts: list[str | int]
    read: PromptText
    texts: list[Text]


class Pruner:
    """Shortens prompts for any engine: whole lines and sentences stay, verbatim and in order.

    The draft scores the prompt as in `SpecStackGenerator`, with the prompt's own queries; no target is needed. System,
    developer and assistant messages, tool definitions and non-text parts are never pruned.

    Parameters
    ----------
    draft : PreTrainedModel
        A loaded draft, whose attention is replaced in place.
    tokenizer : object
        Its tokenizer.
    config : PrefillConfig, optional
        Scoring and keep rate. The unit is always lines, and the queries are the prompt's own.

    Raises
    ------
    ValueError
        For a draft that cannot score, a tokenizer without character offsets, and an invalid configuration.

    Examples
    --------
    >>> from spec_stack import Pruner
    >>> pruner = Pruner.from_pretrained()  # the draft embedded in the package, offline
    >>> text = "def add(a, b):\\n    return a + b\\n" * 40
    >>> result = pruner.prune(text, max_tokens=200, question="What does add return?")
    >>> result.num_kept_tokens <= 200 < result.num_tokens
    True
    """

    def __init__(self, draft: PreTrainedModel, tokenizer: Any, config: PrefillConfig | None = None) -> None:
        config = require_config(config, PrefillConfig)
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("a Pruner needs the draft's tokenizer, a fast one: it gives character offsets")
        self._pair = ModelPair.assemble(draft, draft, tokenizer)
        self._configure(config)

    def _configure(self, config: PrefillConfig) -> None:
        self._pair.check_heads(config)
        self.config = replace(config, granularity="lines", scoring_queries="prompt", positions="contiguous")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({name_of_model(self._pair.draft) or 'draft'}; {self.precision} on {self.device})"

    @classmethod
    def from_pretrained(
        cls,
        draft: str | Path | None = None,
        tokenizer: Any = None,
        *,
        config: PrefillConfig | None = None,
        precision: str = LoadConfig.draft_precision,
        device: str | None = None,
        calibration: str | Path | bool | None = None,
    ) -> Pruner:
        """Load a draft.

        Parameters
        ----------
        draft : str or Path, optional
            A folder, hub id or GGUF file; None is the draft embedded in the package.
        tokenizer : str, Path or object, optional
            The tokenizer or its source; None is the draft's own.
        config : PrefillConfig, optional
            Scoring and keep rate.
        precision : str
            Of the weights (see `LoadConfig`).
        device : str, optional
            None takes CUDA where there is one.
        calibration : str, Path or bool, optional
            As for `SpecStackGenerator.from_pretrained`.

        Raises
        ------
        ValueError
            For a missing draft, a draft that cannot score, and a draft without a tokenizer.
        """
        config = require_config(config, PrefillConfig)
        if draft is None:
            draft, tokenizer = ASSETS / "draft", tokenizer or ASSETS / "target"
        model = open_alone(draft, precision, device).load()
        if tokenizer is None or isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(str(draft if tokenizer is None else tokenizer))
        pruner = cls(model, tokenizer, config)
        pruner._configure(calibrated(config, draft, calibration, pruner._pair, is_pair=False))
        return pruner

    @property
    def tokenizer(self) -> Any:
        """The draft's tokenizer."""
        return self._pair.tokenizer

    @property
    def precision(self) -> str:
        """Of the draft's weights."""
        return self._pair.draft_precision

    @property
    def device(self) -> str:
        """Where the draft is."""
        return str(self._pair.draft.device)

    @property
    def max_positions(self) -> int:
        """Most tokens that the draft reads."""
        return self._pair.max_positions[1]

    @refuses_unknown_options
    def prune(
        self,
        messages: Prunable,
        *,
        keep_rate: float | None = None,
        max_tokens: int | None = None,
        question: str | None = None,
        protect: Sequence[str] = (),
        marker: str | None = None,
        max_dropped_attention: float | None = None,
    ) -> PruneResult:
        """Shorten a prompt.

        Parameters
        ----------
        messages : str or sequence of dict
            A text, or messages in OpenAI's format, with strings or lists of parts as contents.
        keep_rate : float, optional
            Share of tokens to keep. Without it and max_tokens: the configuration's, from min_prompt_tokens on.
        max_tokens : int, optional
            Most tokens to keep, by the draft's tokenizer, protected tokens included.
        question : str, optional
            The question about the prompt, which need not contain it.
        protect : sequence of str
            Strings whose lines are kept.
        marker : str, optional
            Stands for every gap, on a line of its own where lines were dropped. None is an ellipsis, for dropped lines
            (in code in a comment) and inside of sentences; "" is nothing. It counts among the kept tokens.
        max_dropped_attention : float, optional
            The draft's check, as in `PrefillConfig`; None is the configuration's. Under max_tokens it reports alone.

        Raises
        ------
        ValueError
            For invalid values and malformed messages.
        """
        return self.conversation().prune(
            messages,
            keep_rate=keep_rate,
            max_tokens=max_tokens,
            question=question,
            protect=protect,
            marker=marker,
            max_dropped_attention=max_dropped_attention,
        )

    def conversation(self, config: SessionConfig | None = None) -> PrunerConversation:
        """A conversation; each turn passes all of its messages.

        Parameters
        ----------
        config : SessionConfig, optional
            Recall of dropped text.
        """
        return PrunerConversation(self._pair, self.config, require_config(config, SessionConfig))


class PrunerConversation:
    """Prunes the turns of one conversation: kept text stays, and dropped text is recalled to its place.

    Unless text is recalled, a turn's pruned messages start with the previous turn's, so that an engine's prefix cache
    applies. The draft keeps its cache of the conversation. It prunes one turn at a time.
    """

    def __init__(self, pair: ModelPair, config: PrefillConfig, session: SessionConfig) -> None:
        self._pair, self._config, self._session = pair, config, session
        self._draft: CachedModel = pair.new_draft_cache(config.prefill_chunk)
        self._token_ids: Sequence[int] = []
        self._kept: set[int] = set()
        self._is_whole = False
        self._pruning = threading.Lock()

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the draft's cache."""
        return self._draft.num_cached

    @refuses_unknown_options
    def prune(
        self,
        messages: Prunable,
        *,
        keep_rate: float | None = None,
        max_tokens: int | None = None,
        question: str | None = None,
        protect: Sequence[str] = (),
        marker: str | None = None,
        max_dropped_attention: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> PruneResult:
        """Prune a turn; messages: the whole conversation (see `Pruner.prune`).

        on_progress is called as that of `SpecStackGenerator.generate`. An exception of it ends the call, and what the
        draft has read by then is not read again. Raises RuntimeError while another thread prunes a turn.
        """
        if not self._pruning.acquire(blocking=False):
            raise RuntimeError("this conversation is pruning another turn; open one for each thread")
        try:
            config = _config_of(self._config, keep_rate, max_tokens, max_dropped_attention)
            return self._prune(messages, config, max_tokens, question, protect, marker, Progress(on_progress))
        except RequestCancelled as cancelled:
            raise cancelled.error or cancelled from None
        finally:
            self._pruning.release()

    def _prune(
        self,
        messages: Prunable,
        config: PrefillConfig,
        max_tokens: int | None,
        question: str | None,
        protect: Sequence[str],
        marker: str | None,
        progress: Progress,
    ) -> PruneResult:
        if marker is not None and not isinstance(marker, str):
            raise ValueError(f"marker must be a string or None, got {marker!r}")
        is_list = isinstance(protect, Sequence) and not isinstance(protect, str)
        if not is_list or not all(isinstance(each, str) for each in protect):
            raise ValueError(f"protect must be a list of strings, got {protect!r}")
        prompt, num_old = self._read(messages, question, protect)
        num_tokens = len(prompt.read)
        cached = Cached(num_old, sorted(at for at in self._kept if at < num_old))
        # The same prompt again keeps what it kept.
        is_same = list(prompt.read.token_ids) == list(self._token_ids)
        recall = replace(self._session, recall=self._session.recall and not is_same)
        obstacle = scoring_obstacle(config, num_tokens, self._pair.max_positions[1], self._pair.scoring_limit)
        turn = plan_turn(prompt.read.token_ids, lambda: prompt.read, cached, config, recall, obstacle)
        reason = turn.reason
        selection = (turn if isinstance(turn, Plan) else turn.unscored(reason)).selection
        kept, num_recalled = {*cached.positions, *selection.positions}, selection.num_recalled
        if max_tokens is not None and len(kept) <= max_tokens and not obstacle:
            reason = f"off: {len(kept)} tokens are no more than max_tokens={max_tokens}"
            turn = replace(turn, prunes=False) if isinstance(turn, NeedsScore) else turn
        needed = turn if isinstance(turn, NeedsScore) and (turn.prunes or turn.recalls) else None
        inputs = self._inputs(needed, config, progress) if needed else None
        tried: Sequence[TriedRate] = ()
        # A budget that leaves no room for markers goes without.
        for own_marker in (None, "") if marker is None and max_tokens is not None else (marker,):
            if needed is not None and inputs is not None:
                selection = self._select(prompt, needed, inputs, config, max_tokens, own_marker)
                kept, num_recalled = {*cached.positions, *selection.positions}, selection.num_recalled
                tried = selection.tried
            whole = _whole(prompt, kept, own_marker)
            texts = _kept_texts(prompt, whole, own_marker)
            num_kept = len(self._written(prompt, whole, texts))
            if max_tokens is None or num_kept <= max_tokens:
                break
        self._token_ids, self._kept = prompt.read.token_ids, whole
        if max_tokens is not None and num_kept > max_tokens:
            reason += f"; what is never pruned, or was kept before, is over max_tokens={max_tokens}"
        shorter, spans = _shortened(messages, texts), [own for own, _ in texts]
        reason = told(tried, num_kept < num_tokens, reason)
        return PruneResult(shorter, spans, num_tokens, num_kept, num_recalled, reason, list(tried))

    def _written(self, prompt: _Prompt, whole: set[int], texts: Sequence[tuple[KeptText, str]]) -> Sequence[int]:
        """The tokens of a pruned prompt, with its markers."""
        if len(whole) == len(prompt.read):
            return prompt.read.token_ids
        joined: dict[int, str] = {}
        for kept, text in texts:
            joined[kept.message] = f"{joined[kept.message]}{_JOINT}{text}" if kept.message in joined else text
        written = "".join(each if isinstance(each, str) else joined.get(each, "") for each in prompt.parts)
        written = readable(written)
        token_ids: list[int] = self._pair.tokenizer(written, add_special_tokens=False, verbose=False).input_ids
        return token_ids

    def _select(
        self,
        prompt: _Prompt,
        turn: NeedsScore,
        inputs: ScoringInputs,
        config: PrefillConfig,
        max_tokens: int | None,
        marker: str | None,
    ) -> Selection:
        """What is kept of the new text, and recalled."""
        cached, num_old, room = turn.cached.positions, turn.cached.num_tokens, 0
        num_new = len(prompt.read) - num_old
        num_protected = sum(stop - start for start, stop in clip_spans(prompt.read.kept, num_old))
        if max_tokens is None or not turn.prunes:
            return plan_scored(turn, inputs, config, self._session).selection
        best: tuple[int, Selection] | None = None
        if config.max_dropped_attention is not None:
            # The budget decides.
            config = replace(config, max_dropped_attention=1.0)
        for attempt in range(_MOST_TRIES):
            selection = plan_scored(turn, inputs, config, self._session).selection
            if not attempt:
                room = max(1, max_tokens - len(cached) - selection.num_recalled - num_protected)
                config = replace(config, keep_rate=min(1.0, room / num_new))
                selection = plan_scored(turn, inputs, config, self._session).selection
            whole = _whole(prompt, {*cached, *selection.positions}, marker)
            num_left = max_tokens - len(self._written(prompt, whole, _kept_texts(prompt, whole, marker)))
            if num_left >= 0 and (best is None or num_left < best[0]):
                best = num_left, selection
            if (room <= 1 and num_left < 0) or 0 <= num_left <= _UNUSED * max_tokens:
                break
            # Markers and the rest of segments at the ends take room, segments that do not fit leave some.
            room = max(1, room + (num_left if num_left < 0 else num_left // 2))
            config = replace(config, keep_rate=min(1.0, room / num_new))
        return best[1] if best else selection

    def _inputs(self, turn: NeedsScore, config: PrefillConfig, progress: Progress) -> ScoringInputs:
        """The prompt with its scores."""
        draft, token_ids = self._draft, turn.text.token_ids
        # All layers answer; once they ran, the first ones no longer go on alone.
        self._is_whole = self._is_whole or config.max_dropped_attention is not None
        draft.truncate(min(num_shared(draft.token_ids, token_ids), len(token_ids) - 1))
        try:
            inputs = ScoringInputs(turn.text)
            with progress.watch(draft, "scoring", max(1, len(token_ids) - draft.next_position)):
                look_ahead = self._pair.greedy_look_ahead(draft)
                inputs, _ = gather_inputs(
                    draft, inputs, look_ahead, config, whole=self._is_whole, first_query=turn.first_query
                )
                draft.rollback(max(0, draft.next_position - len(token_ids)))
                return inputs
        except BaseException as error:
            # A forward that is cancelled between two layers leaves whole pieces; only a recurrent state is lost.
            if isinstance(error, Exception) or draft.is_stateful:
                self._draft = self._pair.new_draft_cache(self._config.prefill_chunk)
            raise

    def _read(self, messages: Prunable, question: str | None, protect: Sequence[str]) -> tuple[_Prompt, int]:
        """The prompt as the draft reads it, and its number of tokens from earlier turns."""
        if question is not None and not isinstance(question, str):
            raise ValueError(f"question must be a string or None, got {question!r}")
        chat, contents = _contents(messages)
        parts = self._parts(chat, contents, isinstance(messages, str))
        joined = [_JOINT.join(text for _, text in each) for each in contents]
        written, begins = "", []
        for each in parts:
            if not isinstance(each, str):
                begins.append((each, len(written)))
            written += each if isinstance(each, str) else joined[each]
        encoded = self._pair.tokenizer(
            readable(written), add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        token_ids = list(encoded.input_ids)
        starts, ends = ([span[side] for span in encoded.offset_mapping] for side in (0, 1))
        num_old = max(0, min(num_shared(self._token_ids, token_ids), len(token_ids) - 1))
        pieces = self._pair.pieces(token_ids) or []
        lines, texts, turns = find_lines(pieces), [], []
        for message, char in begins:
            role = chat[message]["role"]
            for part, text in contents[message]:
                # An assistant's message is an answer, cached or not.
                segments = cut_segments(text, char, starts, ends, lines)
                texts.append(Text(message, part, text, role in (*KEPT_ROLES, "assistant"), segments))
                start, stop = bisect_left(starts, char), bisect_right(ends, char + len(text))
                char += len(text) + len(_JOINT)
                if role not in KEPT_ROLES and start < stop:
                    turns.append(ChatTurn(role, (start, stop)))
        protected = protected_spans(len(token_ids), texts, protect)
        # A text alone is read as a text: it may be a rendered chat.
        written_turns = None if isinstance(messages, str) else turns
        read = self._pair.reader.read(token_ids, protected, question, written_turns)
        return _Prompt(parts, self._pair.reader.with_pieces(read), texts), num_old

    def _parts(self, chat: Sequence[Message], contents: Sequence[Sequence[_Part]], is_text: bool) -> list[str | int]:
        """The whole prompt: the template's texts, and the indices of messages."""
        tokenizer = self._pair.tokenizer
        joined = [_JOINT.join(text for _, text in each) for each in contents]
        if not is_text:
            return chat_parts(tokenizer, [{**each, "content": text} for each, text in zip(chat, joined, strict=True)])
        has_token = tokenizer(_JOINT).input_ids[:1] == [tokenizer.bos_token_id]
        return [tokenizer.bos_token, 0] if has_token and not joined[0].startswith(tokenizer.bos_token) else [0]


def _config_of(
    config: PrefillConfig, keep_rate: float | None, max_tokens: int | None, max_dropped_attention: float | None
) -> PrefillConfig:
    """The configuration with a call's values; it prunes any length where the call names an amount."""
    if max_dropped_attention is not None:
        config = replace(config, max_dropped_attention=max_dropped_attention)
    max_tokens = cast("int | None", plain(max_tokens))
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError(f"max_tokens must be 1 or more, or None, got {max_tokens!r}")
    if keep_rate is not None and max_tokens is not None:
        raise ValueError("give keep_rate or max_tokens, not both")
    if max_tokens is not None:
        # Any rate under 1 lets `plan_turn` prune; the budget sets it.
        return replace(config, keep_rate=0.5, sparse_prefill="on")
    if keep_rate is not None:
        return replace(config, keep_rate=keep_rate, sparse_prefill="on")
    return config


def _contents(messages: Prunable) -> tuple[list[Message], list[list[_Part]]]:
    """The messages, and the texts of each. Raises ValueError for malformed messages."""
    if not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a text or a list of messages, got {messages!r}")
    chat: list[Message] = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    contents: list[list[_Part]] = []
    for message in chat:
        content = checked_message(message, takes_media=True)["content"] or []
        if isinstance(content, str):
            contents.append([(None, content)])
        else:
            contents.append([(at, part["text"]) for at, part in enumerate(content) if part.get("text") is not None])
    if not any(contents):
        raise ValueError("there is no text to prune; give a text, or messages with some")
    return chat, contents


def _whole(prompt: _Prompt, kept: set[int], marker: str | None) -> set[int]:
    """The kept tokens as whole segments; without a marker some of every text."""
    return whole_segments(len(prompt.read), prompt.texts, kept, may_be_empty=marker != "")


def _kept_texts(prompt: _Prompt, whole: set[int], marker: str | None) -> list[tuple[KeptText, str]]:
    """The kept spans of each text, and what is written of it."""
    spans = [(text, text.kept_spans(whole)) for text in prompt.texts]
    return [(KeptText(text.message, text.part, own), write_spans(text.text, own, marker)) for text, own in spans]


def _shortened(messages: Prunable, texts: Sequence[tuple[KeptText, str]]) -> Any:
    """A prompt with its texts replaced."""
    if isinstance(messages, str):
        return texts[0][1]
    shorter: list[Any] = [dict(message) for message in messages]
    for kept, text in texts:
        if kept.part is None:
            shorter[kept.message]["content"] = text
        else:
            parts = shorter[kept.message]["content"] = list(shorter[kept.message]["content"])
            part = parts[kept.part]
            parts[kept.part] = text if isinstance(part, str) else {**part, "text": text}
    return shorter
