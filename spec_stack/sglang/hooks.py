"""Everything of SGLang that is wrapped, and with what. Under another algorithm each hook only hands on."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from spec_stack.sglang.active_gamma import a_gamma_over_zero
from spec_stack.sglang.admission import RequestPruner, positions_of
from spec_stack.sglang.protocols import RunningRequest, Scheduler
from spec_stack.sglang.radix_keys import place_tokens
from spec_stack.sglang.reports import (
    REPORTED,
    ReplyInfo,
    ReplyMetrics,
    correct_acceptance,
    vllm_metrics,
    with_report,
)
from spec_stack.sglang.request_state import META_INFO, STATE, RequestOptions
from spec_stack.sglang.server_args import ServerConfig, add_flags
from spec_stack.sglang.support import NAME

logger = logging.getLogger(__name__)
_SRT = "sglang.srt"


# Read once: a file that changes under a running server must not change what is refused.
_config = lru_cache(maxsize=1)(ServerConfig.from_environment)


def _is_on() -> bool:
    from sglang.srt.runtime_context import get_spec

    return bool(get_spec().speculative_algorithm == NAME)


def _add_flags(add: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    result = add(parser)
    add_flags(parser)
    return result


def _check_options(verify: Callable[..., None], params: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang makes a 400 of the ValueError."""
    verify(params, *args, **kwargs)
    if params.custom_params and _is_on():
        RequestOptions.parse(params.custom_params, _config())


def _report(
    update: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, list[Any]],
    index: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Put the report into every chunk of a reply, and the prompt's true length, where SGLang counts what it read."""
    others = {key: values for key, values in customized_info.items() if key != META_INFO}
    update(manager, meta_info, state, others, index, *args, **kwargs)
    if META_INFO not in customized_info:
        return
    info: ReplyInfo = getattr(state, STATE, None) or ReplyInfo()
    setattr(state, STATE, info)
    info.add(customized_info[META_INFO][index])
    is_finished = bool(meta_info.get("finish_reason"))
    said = info.meta_info(is_finished)
    if said is None:
        return
    meta_info[META_INFO] = said
    meta_info["prompt_tokens"] = said["num_prompt_tokens"]
    if is_finished:
        meta_info["metrics"] = vllm_metrics(said)
        setattr(state.obj, REPORTED, said)


def _correct_acceptance(
    calculate: Callable[..., None], manager: Any, meta_info: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    calculate(manager, meta_info, *args, **kwargs)
    if META_INFO in meta_info:
        correct_acceptance(meta_info, meta_info[META_INFO])


def _count_reply(collect: Callable[..., None], manager: Any, state: Any, outputs: Any, index: int) -> None:
    """SGLang's prompt tokens by their true number, and this project's own metrics."""
    info: ReplyInfo | None = getattr(state, STATE, None)
    if info is not None and info.num_prompt_tokens is not None:
        outputs.prompt_tokens[index] = info.num_prompt_tokens
    collect(manager, state, outputs, index)
    report = getattr(state.obj, REPORTED, None)
    if state.finished and report is not None:
        metrics: ReplyMetrics = getattr(manager, STATE, None) or ReplyMetrics(manager.served_model_name)
        setattr(manager, STATE, metrics)
        metrics.observe(report, outputs.cached_tokens[index])


def _report_in_stream(
    generate: Callable[..., Any], serving: Any, adapted_request: Any, *args: Any, **kwargs: Any
) -> Any:
    stream = generate(serving, adapted_request, *args, **kwargs)
    return with_report(stream, adapted_request) if _is_on() else stream


def _report_true_rate(report: Callable[..., None], reporter: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's log line and gauge divide by the gamma of this moment; give them counts whose quotient is right."""
    pruner = RequestPruner.of(reporter.scheduler)
    if pruner is None:
        return report(reporter, *args, **kwargs)
    counted, num_steps = reporter.spec_num_correct_drafts, reporter.spec_num_forward_ct
    policy = reporter.scheduler.draft_worker.batch_policy
    with a_gamma_over_zero() as gamma:
        reporter.spec_num_correct_drafts = policy.acceptance_since_reported * num_steps * gamma
        report(reporter, *args, **kwargs)
    if reporter.spec_num_forward_ct == num_steps:
        reporter.spec_num_correct_drafts = counted
    else:
        policy.acceptance_was_reported()
    return None


def _show_state(get: Callable[..., Any], scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    output = get(scheduler, *args, **kwargs)
    pruner = RequestPruner.of(scheduler)
    if pruner is not None:
        output.internal_state[META_INFO] = pruner.state()
    return output


def _decide_at_the_queue(
    add: Callable[..., Any], scheduler: Scheduler, request: RunningRequest, *args: Any, **kwargs: Any
) -> Any:
    pruner = RequestPruner.of(scheduler)
    if pruner is None:
        return add(scheduler, request, *args, **kwargs)
    pruner.arrive(request)
    result = add(scheduler, request, *args, **kwargs)
    pruner.after_queueing(request)
    return result


def _score_between_batches(next_batch: Callable[..., Any], scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    pruner = RequestPruner.of(scheduler)
    if pruner is None:
        return next_batch(scheduler, *args, **kwargs)
    pruner.work()
    with pruner.unscored_set_aside():
        return next_batch(scheduler, *args, **kwargs)


def _forget_first(flush: Callable[..., bool], scheduler: Scheduler, *args: Any, **kwargs: Any) -> bool:
    pruner = RequestPruner.of(scheduler)
    if pruner is not None:
        pruner.forget()
    return flush(scheduler, *args, **kwargs)


def _map_positions(init_new: Callable[..., Any], cls: type, batch: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    forward_batch = init_new(cls, batch, runner, *args, **kwargs)
    mapped = positions_of(forward_batch, batch.reqs, runner)
    if mapped is not None:
        forward_batch.positions = mapped
    return forward_batch


def _need_hidden_states(needed: Callable[[], bool]) -> bool:
    """SGLang knows STANDALONE by its name here. A captured graph hands the draft's hidden states out all the same, a
    prefill does not, and what relays them between steps wants them always or never."""
    return not _is_on() and needed()


# Each is called as hook(SGLang's own function, *its arguments). Without one of these, replies would be wrong.
HOOKS: dict[str, Callable[..., Any]] = {
    f"{_SRT}.server_args.ServerArgs.add_cli_args": _add_flags,
    f"{_SRT}.sampling.sampling_params.SamplingParams.verify": _check_options,
    f"{_SRT}.managers.scheduler.Scheduler._add_request_to_queue": _decide_at_the_queue,
    f"{_SRT}.managers.scheduler.Scheduler.get_next_batch_to_run": _score_between_batches,
    f"{_SRT}.managers.scheduler.Scheduler.flush_cache": _forget_first,
    f"{_SRT}.mem_cache.radix_cache.RadixKey.__init__": place_tokens,
    f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.init_new": _map_positions,
    f"{_SRT}.speculative.spec_utils.spec_need_hidden_states": _need_hidden_states,
}
# Without one of these, a number is missing or SGLang's own.
HOOKS_FOR_NUMBERS: dict[str, Callable[..., Any]] = {
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager.update_request_meta_info": _report,
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics": _correct_acceptance,
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager.collect_metrics": _count_reply,
    f"{_SRT}.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream": _report_in_stream,
    f"{_SRT}.entrypoints.openai.serving_completions.OpenAIServingCompletion._generate_completion_stream": (
        _report_in_stream
    ),
    f"{_SRT}.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats": (
        _report_true_rate
    ),
    f"{_SRT}.managers.scheduler.Scheduler.get_internal_state": _show_state,
}


def register() -> None:
    """Hand the hooks to SGLang, which applies them once all plugins have been called."""
    for target, hook in (HOOKS | HOOKS_FOR_NUMBERS).items():
        HookRegistry.register(target, hook, HookType.AROUND)


def check() -> None:
    """Raise RuntimeError, naming them, where hooks are not in place in this process. Numbers alone are worth a
    warning."""
    missing = [target for target in HOOKS if target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(
            f"{NAME} cannot serve: SGLang did not apply its hooks on {', '.join(missing)}. Look for plugin errors "
            "further up in this log; the environment variable SGLANG_PLUGINS must be unset or name spec_stack"
        )
    without = [target for target in HOOKS_FOR_NUMBERS if target not in HookRegistry._patched]
    if without:
        logger.warning("%s reports less than it could: SGLang has no %s", NAME, ", ".join(without))
