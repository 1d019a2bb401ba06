"""What SGLang calls: SPEC_STACK in its registry of algorithms, and the hooks around its functions.

Under another algorithm each hook only forwards.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_spec
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from spec_stack.sglang.errors import log_and_continue
from spec_stack.sglang.headers import current_headers
from spec_stack.sglang.http import SpecStackMiddleware
from spec_stack.sglang.launch import require_drafting
from spec_stack.sglang.manager import SparsePrefillManager
from spec_stack.sglang.metrics import ReportStore
from spec_stack.sglang.request import (
    KEY,
    ReportAssembler,
    RequestOptions,
    RunningRequest,
    correct_acceptance,
    entry_text,
)
from spec_stack.sglang.scoring import load_scoring_model
from spec_stack.sglang.server_args import ENVIRONMENT, NAME, ServerConfig, add_flags

_SRT = "sglang.srt"
_DEFAULT_RUNNING_REQUESTS = 48


class SpecStackAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """Behaves as STANDALONE in every query, with buffers for the largest gamma."""

    def is_standalone(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        """Apply what SGLang does for STANDALONE by name, with widths for the largest gamma."""
        largest = ServerConfig.from_environment().gammas[-1]
        server_args.speculative_num_steps = largest
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_draft_tokens = largest + 1
        if server_args.max_running_requests is None:
            server_args.max_running_requests = _DEFAULT_RUNNING_REQUESTS
        if server_args.device == "cpu":
            server_args.disable_overlap_schedule = True
        server_args.enable_mixed_chunk = False

    def resolve_max_speculative_num_draft_tokens(self, server_args: Any) -> int:
        return ServerConfig.from_environment().gammas[-1] + 1

    def __getattr__(self, name: str) -> Any:
        # The scheduler asks built-in algorithms for more than CustomSpecAlgo has (create_future_map, need_topk, …).
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(SpeculativeAlgorithm.STANDALONE, name)


def validate(server_args: Any) -> None:
    """Reject unsupported settings before anything is loaded. Raises ValueError with the fix."""
    check()
    require_drafting(server_args, ServerConfig.from_environment())
    _apply(HOOKS_OF_DRAFTING)


# Read once: a file that changes under a running server must not change what is refused.
_config = lru_cache(maxsize=1)(ServerConfig.from_environment)


def _is_on() -> bool:
    return bool(get_spec().speculative_algorithm == NAME) or _config().scoring_model is not None


def _add_flags(add: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    result = add(parser)
    add_flags(parser)
    return result


# The process that reads requests and writes replies


def _prepare_front_end(init: Callable[..., None], manager: Any, *args: Any, **kwargs: Any) -> None:
    init(manager, *args, **kwargs)
    with log_and_continue("preparing the front end", "headers, metrics and early checks of options are missing"):
        books = ReportStore(manager.served_model_name if manager.enable_metrics and _is_on() else None)
        setattr(manager, KEY, books)
        manager.sampling_params_class = _sampling_params
        # An engine without a server has no application, and nothing tells when a client waits.
        if (server := sys.modules.get(f"{_SRT}.entrypoints.http_server")) is not None and _is_on():
            if _config().audit_rate:
                # It makes metrics, and imports what serve needs.
                from spec_stack.sglang.audits import ServerAudits

                books.audits = ServerAudits(manager, _config().audits)
            server.app.add_middleware(SpecStackMiddleware, books=books)


def _sampling_params(**params: Any) -> SamplingParams:
    """SGLang turns the ValueError into a 400."""
    custom = params.get("custom_params")
    with log_and_continue("reading a request's options", "the scheduler reads them again", ValueError):
        if _is_on():
            if isinstance(custom, Mapping) and isinstance(entry := custom.get(KEY), Mapping | list):
                # Whatever fails below: under msgpack a nested value ends SGLang's scheduler.
                params["custom_params"] = {**custom, KEY: entry_text(entry)}
            options, headers = RequestOptions.parse(custom, _config()), current_headers()
            by_header, is_set = headers.options(), options.sparse_prefill or options.keep_rate
            header, whole = None, None if is_set or by_header else headers.whole
            if by_header and not is_set:
                options = RequestOptions.parse({KEY: {**options.as_dict(), **by_header}}, _config())
                header = None if headers.route is None else headers.keep_rate
            options = replace(options, route=headers.route, whole=whole, header=header)
            if options.as_dict():
                params["custom_params"] = {**(custom if isinstance(custom, Mapping) else {}), KEY: options.on_wire()}
    return SamplingParams(**params)


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
    """Put the report into every chunk of a reply, and the true prompt length, where SGLang counts the pruned one."""
    others = {key: values for key, values in customized_info.items() if key != KEY}
    update(manager, meta_info, state, others, index, *args, **kwargs)
    if KEY not in customized_info:
        return
    with log_and_continue("writing a report", "the reply has none"):
        info: ReportAssembler = getattr(state, KEY, None) or ReportAssembler()
        setattr(state, KEY, info)
        info.add(customized_info[KEY][index])
        is_finished = bool(meta_info.get("finish_reason"))
        if (said := info.meta_info(is_finished)) is None:
            return
        meta_info |= {KEY: said, "prompt_tokens": said["num_prompt_tokens"]}
        if is_finished:
            books: ReportStore = getattr(manager, KEY)
            books.close(meta_info, said, is_counted=bool(state.obj.log_metrics))
            if books.audits is not None:
                books.audits.offer(state.obj, said)


def _correct_acceptance(
    calculate: Callable[..., None], manager: Any, meta_info: dict[str, Any], outputs: Any, index: int
) -> None:
    """Runs once per reply, at its end."""
    calculate(manager, meta_info, outputs, index)
    if KEY in meta_info:
        with log_and_continue("correcting SGLang's numbers", "they are SGLang's own"):
            correct_acceptance(meta_info, meta_info[KEY])


def _count_whole_prompt(
    collect: Callable[..., None], manager: Any, state: Any, outputs: Any, index: int, *args: Any, **kwargs: Any
) -> None:
    """SGLang counts the prompt's tokens at a reply's end."""
    with log_and_continue("correcting SGLang's count of prompt tokens", "it counts the kept ones"):
        report: ReportAssembler | None = getattr(state, KEY, None)
        if report is not None and (num_tokens := report.num_prompt_tokens()) is not None:
            outputs.prompt_tokens[index] = num_tokens
    collect(manager, state, outputs, index, *args, **kwargs)


# The scheduler's process


def _show_state(get: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    output = get(scheduler, *args, **kwargs)
    with log_and_continue("showing the state", "/server_info has none"):
        if (manager := SparsePrefillManager.of(scheduler)) is not None:
            output.internal_state[KEY] = manager.state()
    return output


def _load_before_the_pools(init: Callable[..., None], scheduler: Any) -> None:
    """Not guarded: a scoring model that cannot be used ends the launch."""
    init(scheduler)
    if _config().scoring_model is not None:
        check()
    load_scoring_model(scheduler)


def _decide_at_the_queue(
    add: Callable[..., Any], scheduler: Any, request: RunningRequest, *args: Any, **kwargs: Any
) -> Any:
    manager = SparsePrefillManager.of(scheduler)
    result = add(scheduler, request, *args, **kwargs)
    if manager is not None:
        manager.on_request(request)
    return result


def _score_between_batches(next_batch: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    manager = SparsePrefillManager.of(scheduler)
    if manager is None:
        if _config().scoring_model is not None:
            raise RuntimeError(
                f"{NAME} cannot score: SGLang did not apply its hooks on {', '.join(HOOKS_OF_SCORING_MODEL)}"
            )
        return next_batch(scheduler, *args, **kwargs)
    manager.step()
    with manager.unscored_set_aside():
        return next_batch(scheduler, *args, **kwargs)


def _place_draft(init_new: Callable[..., Any], cls: type, batch: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    forward_batch = init_new(cls, batch, runner, *args, **kwargs)
    if (slots := getattr(runner, KEY, None)) is not None:
        slots.place(forward_batch, batch)
    return forward_batch


# Each is called as hook(SGLang's own function, *its arguments).
HOOKS: dict[str, Callable[..., Any]] = {
    f"{_SRT}.server_args.ServerArgs.add_cli_args": _add_flags,
    f"{_SRT}.managers.scheduler.Scheduler._add_request_to_queue": _decide_at_the_queue,
    f"{_SRT}.managers.scheduler.Scheduler.get_next_batch_to_run": _score_between_batches,
    f"{_SRT}.managers.scheduler.Scheduler.get_internal_state": _show_state,
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager.__init__": _prepare_front_end,
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager.update_request_meta_info": _report,
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager.collect_metrics": _count_whole_prompt,
}
# Applied by a launch of SPEC_STACK, and by one whose draft has slots of its own.
HOOKS_OF_DRAFTING: dict[str, Callable[..., Any]] = {
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics": _correct_acceptance,
}
HOOKS_OF_KV_SLOTS: dict[str, Callable[..., Any]] = {
    f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.init_new": _place_draft,
}
# Applied wherever there are settings, which may name a scoring model with another algorithm.
HOOKS_OF_SCORING_MODEL: dict[str, Callable[..., Any]] = {
    f"{_SRT}.managers.scheduler.Scheduler.maybe_init_draft_worker": _load_before_the_pools,
}


def register() -> None:
    """Pass the algorithm and the hooks to SGLang, which applies these after all plugins are loaded."""

    @SpeculativeAlgorithm.register(  # type: ignore[untyped-decorator]
        NAME, supports_overlap=True, validate_server_args=validate, spec_class=SpecStackAlgorithm
    )
    def make_worker(server_args: Any) -> type:
        check()
        if ServerConfig.from_environment().prefill.sparse_prefill == "draft_only":
            _apply(HOOKS_OF_KV_SLOTS)
        from spec_stack.sglang.worker import SpecStackWorker

        return SpecStackWorker

    more = HOOKS_OF_SCORING_MODEL if os.environ.get(ENVIRONMENT) else {}
    for target, hook in (HOOKS | more).items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _apply(hooks: Mapping[str, Callable[..., Any]]) -> None:
    """Apply hooks after SGLang has applied those of `register`, once. Raises RuntimeError where SGLang does not."""
    new = {target: hook for target, hook in hooks.items() if target not in HookRegistry._patched}
    for target, hook in new.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    check(new)


def check(hooks: Iterable[str] = tuple(HOOKS)) -> None:
    """Raise RuntimeError where hooks are not in place in this process."""
    missing = [target for target in hooks if target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(
            f"{NAME} cannot serve: SGLang did not apply its hooks on {', '.join(missing)}. Look for plugin errors "
            "further up in this log; the environment variable SGLANG_PLUGINS must be unset or name spec_stack"
        )
