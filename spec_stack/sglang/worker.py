"""The speculative worker: SGLang's STANDALONE, with gamma chosen anew for every step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend, with_phase
from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture
from sglang.srt.runtime_context import get_context, get_exec
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker, StandaloneWorkerV2
from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length

from spec_stack.sglang.batch_policy import BatchPolicy, end_chains, step_clock
from spec_stack.sglang.draft_kv_slots import DraftKVSlots, protect_kv_lengths
from spec_stack.sglang.errors import log_and_continue, log_failure
from spec_stack.sglang.launch import Launch, require_no_state
from spec_stack.sglang.penalties import Penalties
from spec_stack.sglang.ranks import contained, first_ranks_choice
from spec_stack.sglang.request import KEY
from spec_stack.sglang.scoring import draft_scorer, fit_draft
from spec_stack.sglang.server_args import ServerConfig

# Of SGLang's logs: the line and the entry of a change of gamma.
_SWITCH, _OVERRIDE = "Switch adaptive runtime state", "adaptive_spec.restore"
_CAPTURE = "spec_stack.capture"


class SpecStackDraftWorker(StandaloneDraftWorker):  # type: ignore[misc]
    """SGLang's draft worker. slots: its own; None shares the target's."""

    slots: DraftKVSlots | None = None

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        pools = memory_pool_config, req_to_token_pool
        if self.slots is not None:
            pools = self.slots.pools(memory_pool_config, req_to_token_pool)
        super().alloc_memory_pool(*pools, token_to_kv_pool_allocator)
        # SGLang finds the target's slots by this one.
        self.req_to_token_pool = req_to_token_pool

    def init_attention_backend(self) -> None:
        super().init_attention_backend()
        if self.slots is not None:
            args = self.draft_runner.server_args
            name = args.speculative_draft_attention_backend or self.draft_runner.decode_attention_backend_str
            protect_kv_lengths(self.draft_attn_backend, name)

    def _draft_extend_for_prefill(
        self, batch: Any, hidden_states: Any, next_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.slots is not None and not batch.forward_mode.is_idle():
            self.slots.note_prefill(batch)
            return self.slots.no_proposal(next_token_ids)
        return super()._draft_extend_for_prefill(batch, hidden_states, next_token_ids, *args, **kwargs)

    def _draft_extend_for_decode(self, batch: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        own: AbstractContextManager[None] = nullcontext()
        if self.slots is not None and not batch.forward_mode.is_idle():
            own = self.slots.catching_up(batch, self.speculative_num_draft_tokens)
            kwargs.pop("kv_loc_plan", None)
        with own:
            result = super()._draft_extend_for_decode(batch, output, *args, **kwargs)
        # A captured graph returns the draft's hidden states and a prefill does not, and the relay between steps needs
        # them always or never. A standalone draft does not use them.
        if output.next_draft_input is not None:
            output.next_draft_input.hidden_states = None
        return result


class SpecStackWorker(StandaloneWorkerV2):  # type: ignore[misc]
    """Made by SGLang in each scheduler process."""

    slots: DraftKVSlots | None = None

    def __init__(self, server_args: Any, *args: Any, **kwargs: Any) -> None:
        # SGLang's own worker fails over such a draft as it loads, without saying why.
        found = get_config(server_args.speculative_draft_model_path, trust_remote_code=server_args.trust_remote_code)
        require_no_state(found.get_text_config())
        # SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN lets SGLang write the target's over it.
        positions = get_context_length(found.get_text_config())
        self._config = config = ServerConfig.from_environment()
        super().__init__(server_args, *args, **kwargs)
        # SGLang's worker makes its draft worker by name, and its backends only later.
        self.draft_worker.__class__ = SpecStackDraftWorker
        runner, draft, launch = self.target_worker.model_runner, self.draft_worker.draft_runner, self._launch
        self.scorer = draft_scorer(launch, draft, positions)
        if config.prefill.sparse_prefill == "draft_only":
            num_requests = launch.args.max_running_requests
            num_bytes = launch.bytes_per_token()
            self.slots = DraftKVSlots(draft, config.prefill, config.gammas[-1], num_requests, num_bytes)
            self.draft_worker.slots = self.slots
            # `hooks` reads them.
            setattr(draft, KEY, self.slots)
            # SGLang would reserve as many tokens for the draft as the target has.
            runner.spec_aux_config.eagle_draft_num_layers = 0
        self.batch_policy = BatchPolicy(
            config,
            precision=str(runner.dtype).removeprefix("torch."),
            agree=first_ranks_choice,
            clock=step_clock(self.server_args.device),
        )
        self.adaptive_controller = GraphedController(self, self.batch_policy)
        self._penalties = Penalties()
        # SGLang logs every change of gamma, which it expects rarely; here gamma may change at every step.
        logging.getLogger(eagle_worker_v2.__name__).addFilter(lambda entry: not entry.getMessage().startswith(_SWITCH))

    def state(self) -> dict[str, Any]:
        """Counters, as /server_info shows them. SGLang's log of gamma overrides must not grow with the steps."""
        slots = {} if self.slots is None else self.slots.state()
        kept = {"draft_kv_budget": slots, "num_overrides_kept": len(get_context()._overrides_log)}
        return {**self.batch_policy.state(), **kept}

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        """None: a weight update is of the target, and its checkpoint is not the draft's."""
        return []

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        """Of SGLang 0.5.20, as `update_weights_from_ipc`: the draft stays as it is."""
        return True, "the draft keeps its weights"

    update_weights_from_ipc = update_weights_from_disk

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        """Of SGLang 0.5.20, which asks the speculative worker for both models."""
        return self.target_worker.update_weights_from_tensor(recv_req)

    def _validate_vocab_compatibility(self, target_vocab_size: int, target_tokenizer: Any) -> None:
        """SGLang's requires equally many embedding rows; one tokenizer is enough. Called before any KV is allocated."""
        target, draft = self.target_worker.model_runner.model_config, self.draft_worker.draft_runner
        # The record holds the launch arguments; SGLang's and the algorithm's changes are an overlay.
        args = resolving_view(self.server_args)
        self._launch = Launch.drafting(args, target, draft.model_config, target_tokenizer, self._config)
        if self._launch.must_fit:
            fit_draft(draft.model, target_vocab_size, draft.model_config.vocab_size)

    def apply_runtime_state(self, state: Any) -> None:
        super().apply_runtime_state(state)
        with log_and_continue("forgetting earlier gammas", "SGLang's record of them grows"):
            _forget_earlier_gammas(get_context()._overrides_log)

    def build_adaptive_runtime_state(self, *args: Any, cuda_graph_bs: list[int] | None = None, **kwargs: Any) -> Any:
        with captured_at(cuda_graph_bs):
            return super().build_adaptive_runtime_state(*args, cuda_graph_bs=cuda_graph_bs, **kwargs)

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self.batch_policy.invalidate_step_timing()
            self._penalties.correct_prefill(batch.reqs, batch.sampling_info, batch.seq_lens.device)
            return super().forward_batch_generation(batch, *args, **kwargs)
        if self.slots is not None and not batch.forward_mode.is_idle():
            with contained("choosing the draft's slots", "it proposes what will not be accepted"):
                if self.slots.has_new(batch):
                    self.batch_policy.invalidate_step_timing()
                self.slots.begin_step(batch)
        self.batch_policy.begin_step(batch.reqs)
        return super().forward_batch_generation(batch, *args, **kwargs)

    def verify(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_idle():
            try:
                end_chains(batch.spec_info.retrieve_next_token, self.batch_policy.caps)
            except Exception:
                # Verified whole, penalised requests would get a wrong text.
                log_failure("ending proposals at their caps", "none of their tokens is accepted")
                batch.spec_info.retrieve_next_token[:, 0].fill_(-1)
            # SGLang's own tokens of gamma 0 are int32 without overlap, and CUDA's kernels take int64 alone.
            batch.spec_info.draft_token = batch.spec_info.draft_token.long()
            newest = batch.spec_info.draft_token[:: batch.spec_info.draft_token_num]
            self._penalties.correct_step(batch.reqs, batch.sampling_info, newest, batch.seq_lens)
        return super().verify(batch, *args, **kwargs)


def _forget_earlier_gammas(log: list[tuple[str, Any]]) -> None:
    """Keep the newest gamma entry of SGLang's log, the only one that it reads. Mutates the log."""
    ours = [at for at, (source, _) in enumerate(log) if source == _OVERRIDE]
    for at in reversed(ours[:-1]):
        del log[at]


def sizes_to_capture(runner: Any) -> list[int] | None:
    """The batch sizes of a model runner's graphs; None where it captures none."""
    if check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
        return None
    return list(get_batch_sizes_to_capture(runner)[0])


@contextmanager
def captured_at(sizes: Sequence[int] | None) -> Iterator[None]:
    """Capture graphs for these batch sizes alone inside the block; None changes nothing.

    SGLang's own override of an adaptive step's sizes writes `cuda_graph_bs_decode`, which no runner reads.
    """
    if sizes is None:
        yield
        return
    config = get_exec().graph.cuda_graph_config
    pruned = {"bs": list(sizes)} if sizes else {"backend": Backend.DISABLED}
    get_context().override(_CAPTURE, cuda_graph_config=with_phase(config, Phase.DECODE, **pruned))
    try:
        yield
    finally:
        get_context().override(_CAPTURE, cuda_graph_config=config)


class GraphedController(AdaptiveController):  # type: ignore[misc]
    """SGLang's, with the captured sizes passed to its policy in place of a rarely set flag."""

    def init_states(self, cuda_graph_bs: list[int] | None = None) -> None:
        super().init_states(sizes_to_capture(self.worker.target_worker.model_runner))
