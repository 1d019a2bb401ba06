"""The speculative worker: SGLang's STANDALONE, with gamma chosen anew for every step."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker, StandaloneWorkerV2

from spec_stack.sglang import hooks
from spec_stack.sglang.active_gamma import forget_earlier_gammas_of_this_process
from spec_stack.sglang.batch_policy import BatchPolicy
from spec_stack.sglang.launch_notes import prunes
from spec_stack.sglang.padded_vocabulary import fit_draft, have_one_vocabulary
from spec_stack.sglang.pooled_draft import PooledDraft
from spec_stack.sglang.positions import protect_kv_lengths
from spec_stack.sglang.ranks import first_ranks_gamma
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.support import pruning_refusal

logger = logging.getLogger(__name__)
_SWITCH = "Switch adaptive runtime state"


class SpecStackDraftWorker(StandaloneDraftWorker):  # type: ignore[misc]
    """SGLang's, whose attention takes its KV lengths from lengths. Backends are made at launch, one per gamma."""

    def init_attention_backend(self) -> None:
        super().init_attention_backend()
        protect_kv_lengths(self.draft_attn_backend)


class SpecStackWorker(StandaloneWorkerV2):  # type: ignore[misc]
    """Made by SGLang in each scheduler process. Raises RuntimeError where the plugin's hooks are not in place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        hooks.check()
        super().__init__(*args, **kwargs)
        # SGLang's worker makes its draft worker by name, and its backends only later.
        self._draft_worker.__class__ = SpecStackDraftWorker
        runner, draft = self._target_worker.model_runner, self._draft_worker.draft_runner
        config = ServerConfig.from_environment()
        self.pruning_refusal = pruning_refusal(self.server_args, runner.model_config, draft.model_config)
        self.pooled_draft = PooledDraft(draft, config.draft_pool_tokens)
        if prunes(config, self.pruning_refusal):
            # Weights are loaded, and SGLang has not sized its pools yet: it divides what memory is left.
            self.pooled_draft.allocate()
        self.batch_policy = BatchPolicy(
            config,
            precision=str(runner.dtype).removeprefix("torch."),
            agree=first_ranks_gamma,
        )
        self.adaptive_controller = AdaptiveController(self, self.batch_policy)
        # SGLang logs every change of gamma, which it expects now and then; here it is every step's business.
        logging.getLogger(eagle_worker_v2.__name__).addFilter(lambda entry: not entry.getMessage().startswith(_SWITCH))

    def _validate_vocab_compatibility(self, target_vocab_size: int, target_tokenizer: Any) -> None:
        """STANDALONE wants as many embedding rows on both sides; one tokenizer is enough."""
        runner = self._draft_worker.draft_runner
        draft_vocab_size = runner.model_config.vocab_size
        if draft_vocab_size == target_vocab_size or not have_one_vocabulary(target_tokenizer, self.server_args):
            super()._validate_vocab_compatibility(target_vocab_size, target_tokenizer)
            return
        logger.info("the draft's %d embedding rows are fitted to the target's %d", draft_vocab_size, target_vocab_size)
        fit_draft(runner.model, draft_vocab_size, target_vocab_size)

    def apply_runtime_state(self, state: Any) -> None:
        super().apply_runtime_state(state)
        forget_earlier_gammas_of_this_process()

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self.batch_policy.something_else_runs()
        else:
            self.batch_policy.begin_step(batch.reqs)
        return super().forward_batch_generation(batch, *args, **kwargs)
