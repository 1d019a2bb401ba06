"""spec_stack as a model of lm-evaluation-harness: `pip install lm-eval`, and its command line with this file in front.

    python examples/lm_eval_harness.py run --model spec_stack --model_args target=…,draft=…,keep_rate=0.2 --tasks …

model_args are the options of `SpecStackGenerator.from_pretrained`, with max_length, seed and `_OPTIONS`. Contexts are
pruned as prompts are, with their end as the question. A whole text (rolling log-likelihood) has no question to be
pruned by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from spec_stack import PrefillConfig, SamplingParams, SpecStackConfig, SpecStackGenerator
from spec_stack.config import DEFAULT_MAX_TOKENS
from spec_stack.engine.engine import PrefilledPrompt, token_logprobs
from spec_stack.engine.request import Call

_OPTIONS = ("keep_rate", "sparse_prefill", "policy", "gamma", "records")
# lm-eval's names for the maximum number of new tokens.
_MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens")
_KNOWN_SAMPLING = {"until", "do_sample", "temperature", "top_p", "top_k", *_MAX_TOKENS_NAMES}


@register_model("spec_stack")
class SpecStackLM(TemplateLM):
    """One request at a time. max_length: most tokens of context and answer; contexts lose their beginning."""

    def __init__(
        self,
        *,
        min_prompt_tokens: int = PrefillConfig.min_prompt_tokens,
        max_length: int | None = None,
        seed: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        tokenizer: str | None = None,  # read by RULER's tasks
        **options: Any,
    ) -> None:
        super().__init__()
        if str(batch_size) not in ("None", "1", "auto"):
            raise ValueError(f"batch_size must be 1, got {batch_size}; requests run one at a time")
        self._options = {name: options.pop(name) for name in _OPTIONS if name in options}
        config = SpecStackConfig(PrefillConfig(min_prompt_tokens=min_prompt_tokens))
        self.generator = SpecStackGenerator.from_pretrained(**options, config=config)
        self.tokenizer, limit = self.generator.tokenizer, self.generator.pair.max_positions[0]
        self.max_length, self._seed = min(max_length or limit, limit), seed
        self._context: tuple[list[int], PrefilledPrompt] | None = None

    @property
    def eot_token_id(self) -> int:
        return min(self.generator.pair.end_ids)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        end = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **end))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; a text that starts with the BOS token, as a rendered chat does, gets no second one."""
        if add_special_tokens is None:
            add_special_tokens = not (self.tokenizer.bos_token and string.startswith(self.tokenizer.bos_token))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False).input_ids)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        answers = []
        for request in requests:
            context, gen_kwargs = request.args
            params = sampling_of(gen_kwargs, self._seed)
            context_ids = self.tok_encode(context)[-self._room(params.max_tokens or 0) :]
            task = str(getattr(request, "task_name", None) or "")
            result = self.generator.generate(input_ids=context_ids, params=params, task=task, **self._options)
            self.cache_hook.add_partial("generate_until", request.args, result.text)
            answers.append(result.text)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("a whole text is scored by its target alone; use lm-eval's --model hf")

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        found = []
        for texts, context, continuation in requests:
            found.append((0.0, True))
            if continuation:
                logits = self._prefilled(context[-self._room(len(continuation)) :]).logits(continuation)
                likelihood = float(token_logprobs(logits, continuation).sum())
                found[-1] = likelihood, logits.argmax(dim=-1).tolist() == continuation
            self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        return found

    def _room(self, num_new: int) -> int:
        if num_new >= self.max_length:
            raise ValueError(f"a task asks for {num_new} tokens, and max_length is {self.max_length}")
        return self.max_length - num_new

    def _prefilled(self, context: list[int]) -> PrefilledPrompt:
        """The cached context; an equal one is used again (the choices of a question follow each other)."""
        if self._context is None or self._context[0] != context:
            own = {name: self._options[name] for name in ("keep_rate", "sparse_prefill") if name in self._options}
            call = Call(input_ids=context, max_tokens=1, **own)
            self._context = context, PrefilledPrompt(self.generator.engine, call)
        return self._context[1]


def sampling_of(gen_kwargs: Mapping[str, Any], seed: int) -> SamplingParams:
    """lm-eval's generation arguments as `generate`'s. Raises ValueError for one without a counterpart."""
    if unknown := set(gen_kwargs) - _KNOWN_SAMPLING:
        raise ValueError(f"no counterpart of {', '.join(sorted(unknown))}; known: {', '.join(sorted(_KNOWN_SAMPLING))}")
    until = gen_kwargs.get("until") or ()
    max_tokens = next((int(gen_kwargs[name]) for name in _MAX_TOKENS_NAMES if name in gen_kwargs), DEFAULT_MAX_TOKENS)
    drawn: dict[str, Any] = {}
    if gen_kwargs.get("do_sample") and gen_kwargs.get("temperature"):
        drawn = {name: gen_kwargs[name] for name in ("temperature", "top_p", "top_k") if name in gen_kwargs} | {
            "seed": seed
        }
    stop = (until,) if isinstance(until, str) else tuple(filter(None, until))
    return SamplingParams(max_tokens=max_tokens, stop=stop, **drawn)


if __name__ == "__main__":
    cli_evaluate()
