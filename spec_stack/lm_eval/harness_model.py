"""The generator as an lm-evaluation-harness model: one request at a time, with pruned contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from spec_stack.api.generator import SpecStackGenerator
from spec_stack.api.unknown_options import refuses_unknown_options
from spec_stack.config import (
    DEFAULT_MAX_TOKENS,
    LoadConfig,
    PrefillConfig,
    SamplingParams,
    SparsePrefill,
    SpecStackConfig,
)
from spec_stack.engine.engine import PrefilledPrompt, token_logprobs
from spec_stack.engine.request import Call
from spec_stack.records import check_record_path
from spec_stack.settings.plugins import import_plugins

# lm-eval's names for the maximum number of new tokens.
_MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens")
_KNOWN_SAMPLING = {"until", "do_sample", "temperature", "top_p", "top_k", *_MAX_TOKENS_NAMES}


class SpecStackLM(TemplateLM):  # type: ignore[misc]
    """`lm_eval --model spec_stack --model_args target=…,draft=…,keep_rate=0.2`.

    Parameters
    ----------
    target, draft : str, optional
        Folders or hub ids; the embedded pair by default.
    keep_rate : float, optional
        Share of each context that the target prefills; 1.0 is dense. None is the pair's calibration, or the default.
    sparse_prefill : {"auto", "on", "off", "draft_only"}
        As in `SpecStackGenerator.generate`.
    min_prompt_tokens : int
        Shortest context that "auto" prunes.
    policy : str, optional
        The policy that chooses gamma.
    gamma : int, optional
        Short for the policy "fixed"; 0 is plain decoding.
    precision, draft_precision, device, calibration
        As in `SpecStackGenerator.from_pretrained`; calibration=none uses none.
    max_length : int, optional
        Most tokens of context and answer; a longer context is truncated on the left, as in lm-eval's own models. None
        is both models' limit.
    seed : int
        For tasks that sample.
    records : str, optional
        As in `SpecStackGenerator.generate`: a .jsonl file for the steps of generated answers.
    batch_size, max_batch_size
        Passed by lm-eval; requests run one at a time.
    tokenizer : str, optional
        Read by RULER's tasks, not here.

    Raises
    ------
    ValueError
        For an invalid value, and for a batch of more than one.

    Notes
    -----
    Log-likelihoods: the context is pruned as a prompt is, with its end as the question, and every continuation is
    scored whole over the kept slots. Contexts under min_prompt_tokens are dense. Rolling log-likelihoods raise
    NotImplementedError: a whole text has no question to be pruned by.
    """

    @refuses_unknown_options
    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        *,
        keep_rate: float | None = None,
        sparse_prefill: SparsePrefill = PrefillConfig.sparse_prefill,
        min_prompt_tokens: int = PrefillConfig.min_prompt_tokens,
        policy: str | None = None,
        gamma: int | None = None,
        precision: str = LoadConfig.precision,
        draft_precision: str = LoadConfig.draft_precision,
        device: str | None = None,
        calibration: str | None = None,
        max_length: int | None = None,
        seed: int = 0,
        records: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        import_plugins()
        if str(batch_size) not in ("None", "1", "auto"):
            raise ValueError(f"batch_size must be 1, got {batch_size}; requests run one at a time")
        if records is not None:
            check_record_path(records)
        config = SpecStackConfig(PrefillConfig(min_prompt_tokens=min_prompt_tokens, sparse_prefill=sparse_prefill))
        self.generator = SpecStackGenerator.from_pretrained(
            target,
            draft,
            precision=precision,
            draft_precision=draft_precision,
            device=device,
            config=config,
            calibration=False if calibration == "none" else calibration,
        )
        if self.generator.tokenizer is None:
            raise ValueError("the target has no tokenizer; lm-eval's requests are texts")
        self.tokenizer = self.generator.tokenizer
        self._name = target or "embedded"
        self._options: dict[str, Any] = {
            "keep_rate": None if keep_rate is None else float(keep_rate),
            "sparse_prefill": sparse_prefill,
            "policy": policy,
            "gamma": gamma,
        }
        limit = self.generator.pair.max_positions[0]
        self.max_length = limit if max_length is None else min(int(max_length), limit)
        self._seed, self._records = seed, records
        self._context: PrefilledPrompt | None = None
        self._context_ids: list[int] = []

    @property
    def eot_token_id(self) -> int:
        ends = sorted(self.generator.pair.end_ids)
        if not ends:
            raise ValueError("the target names no end-of-sequence token")
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: BOS, or else EOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """Part of the key of lm-eval's request caches."""
        return str(self.tokenizer.name_or_path or self._name).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as text, by the tokenizer's template."""
        end = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **end))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; a text that starts with the BOS token, e.g. a rendered chat, gets no second one."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        ids = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False).input_ids
        return [int(token_id) for token_id in ids]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """One answer per request."""
        answers = []
        for request in tqdm(requests, disable=disable_tqdm, desc="spec_stack"):
            context, asked = request.args
            params = sampling_of(asked, self._seed)
            room = self.max_length - (params.max_tokens or 0)
            if room < 1:
                raise ValueError(f"a task asks for {params.max_tokens} tokens, and max_length is {self.max_length}")
            result = self.generator.generate(
                input_ids=self.tok_encode(context)[-room:],
                params=params,
                task=str(getattr(request, "task_name", None) or ""),
                records=self._records,
                **self._options,
            )
            self.cache_hook.add_partial("generate_until", request.args, result.text)
            answers.append(result.text)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("a whole text is scored by its target alone; use lm-eval's --model hf")

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found = []
        for texts, context, continuation in tqdm(requests, disable=kwargs.get("disable_tqdm", False)):
            room = self.max_length - len(continuation)
            if room < 1:
                raise ValueError(f"a continuation of {len(continuation)} tokens exceeds max_length={self.max_length}")
            answer = self._score(context[-room:], continuation)
            self.cache_hook.add_partial("loglikelihood", texts, answer)
            found.append(answer)
        return found

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Log-likelihood of a continuation (n,), and whether greedy decoding would produce it."""
        if not continuation:
            return 0.0, True
        logits = self._prefilled(context).logits(continuation)
        likelihood = float(token_logprobs(logits, continuation).sum())
        return likelihood, logits.argmax(dim=-1).tolist() == continuation

    def _prefilled(self, context: list[int]) -> PrefilledPrompt:
        """The cached context; the previous one is reused if equal (choices of a question are adjacent)."""
        if self._context is None or self._context_ids != context:
            call = Call(
                input_ids=context,
                max_tokens=1,
                keep_rate=self._options["keep_rate"],
                sparse_prefill=self._options["sparse_prefill"],
            )
            self._context, self._context_ids = PrefilledPrompt(self.generator.engine, call), context
        return self._context


def sampling_of(asked: Mapping[str, Any], seed: int) -> SamplingParams:
    """lm-eval's generation arguments as `generate` options. Raises ValueError for an unsupported one."""
    unknown = set(asked) - _KNOWN_SAMPLING
    if unknown:
        raise ValueError(f"no counterpart of {', '.join(sorted(unknown))}; known: {', '.join(sorted(_KNOWN_SAMPLING))}")
    until = asked.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    max_tokens = next((int(asked[name]) for name in _MAX_TOKENS_NAMES if name in asked), DEFAULT_MAX_TOKENS)
    temperature = float(asked.get("temperature") or 0.0) if asked.get("do_sample") else 0.0
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=int(asked.get("top_k", 0)) if temperature else 0,
        top_p=float(asked.get("top_p", 1.0)) if temperature else 1.0,
        seed=seed if temperature else None,
        stop=stop,
    )
