"""Everything of SGLang that is wrapped, and with what. Under another algorithm each hook only hands on."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from spec_stack.sglang.admission import CAPTURE, RequestPruner, positions_of
from spec_stack.sglang.positions import protect_kv_lengths
from spec_stack.sglang.protocols import RunningRequest, Scheduler, TokenizedRequest
from spec_stack.sglang.request_state import META_INFO, STATE, ReplyInfo, RequestOptions
from spec_stack.sglang.server_args import ServerConfig, add_flags
from spec_stack.sglang.support import NAME

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
    said = info.meta_info(is_finished=bool(meta_info.get("finish_reason")))
    if said is not None:
        meta_info[META_INFO] = said
        if said["specprefill"]:
            meta_info["prompt_tokens"] = said["num_prompt_tokens"]


def _prune(handle: Callable[..., Any], scheduler: Scheduler, request: TokenizedRequest, *args: Any) -> Any:
    pruner = RequestPruner.of(scheduler)
    if pruner is None:
        return handle(scheduler, request, *args)
    with pruner.pruned(request):
        return handle(scheduler, request, *args)


def _attach_state(init: Callable[..., None], scheduler: Scheduler, request: RunningRequest) -> None:
    pruner = RequestPruner.of(scheduler)
    if pruner is not None:
        pruner.attach_state(request)
    init(scheduler, request)


def _reserve_a_row_for_scoring(count: Callable[..., int], scheduler: Scheduler, *args: Any, **kwargs: Any) -> int:
    """Scoring needs a request row of its own, also when the server is full."""
    allowed: int = count(scheduler, *args, **kwargs)
    pool = scheduler.req_to_token_pool
    pruner = RequestPruner.of(scheduler)
    if pruner is None or not pruner.prunes or pool.size < 2:
        return allowed
    return min(allowed, max(int(pool.available_size()) - 1, 0))


def _map_positions(init_new: Callable[..., Any], cls: type, batch: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    forward_batch = init_new(cls, batch, runner, *args, **kwargs)
    mapped = positions_of(forward_batch, batch.reqs, runner)
    if mapped is not None:
        forward_batch.positions = mapped
    return forward_batch


def _need_hidden_states(needed: Callable[[], bool]) -> bool:
    return not _is_on() and needed()


def _protect_draft(create: Callable[..., Any], factory: Any) -> Any:
    backend = create(factory)
    return protect_kv_lengths(backend) if _is_on() else backend


# Each is called as hook(SGLang's own function, *its arguments).
HOOKS: dict[str, Callable[..., Any]] = {
    f"{_SRT}.server_args.ServerArgs.add_cli_args": _add_flags,
    f"{_SRT}.sampling.sampling_params.SamplingParams.verify": _check_options,
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager.update_request_meta_info": _report,
    f"{_SRT}.managers.scheduler.Scheduler.handle_generate_request": _prune,
    f"{_SRT}.managers.scheduler.Scheduler.init_req_max_new_tokens": _attach_state,
    f"{_SRT}.managers.scheduler.Scheduler.get_num_allocatable_reqs": _reserve_a_row_for_scoring,
    f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.init_new": _map_positions,
    f"{_SRT}.layers.radix_attention.RadixAttention.forward": CAPTURE.attend,
    f"{_SRT}.speculative.spec_utils.spec_need_hidden_states": _need_hidden_states,
    f"{_SRT}.speculative.draft_utils.DraftBackendFactory.create_decode_backend": _protect_draft,
}


def register() -> None:
    """Hand the hooks to SGLang, which applies them once all plugins have been called."""
    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def check() -> None:
    """Raise RuntimeError, naming them, where hooks are not in place in this process."""
    missing = [target for target in HOOKS if target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(
            f"{NAME} cannot serve: SGLang did not apply its hooks on {', '.join(missing)}. Look for plugin errors "
            "further up in this log; the environment variable SGLANG_PLUGINS must be unset or name spec_stack"
        )
