"""SpecStackGenerator: one draft model for both phases, over transformers models."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_stack.api.answering import GenerationMixin
from spec_stack.api.session import Session
from spec_stack.api.unknown_options import refuses_unknown_options
from spec_stack.config import (
    DecodeConfig,
    DraftStep,
    HubConfig,
    LoadConfig,
    PrefillConfig,
    SessionConfig,
    SpecStackConfig,
)
from spec_stack.controller.base import Policy
from spec_stack.decode.ngram_index import SharedNgramCache
from spec_stack.engine.conversation_file import load_conversation
from spec_stack.engine.engine import Engine
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.request import Call, Request
from spec_stack.hf.architectures import text_config
from spec_stack.hf.loading import ASSETS, DeviceMap, find_tokenizers, name_of_model
from spec_stack.prefill.shipped import AUTO, choose_calibration, file_of, sketch
from spec_stack.settings.checks import require_config
from spec_stack.settings.warning import warn_caller
from spec_stack.types import GenerationResult, StepOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SpecStackGenerator(GenerationMixin):
    """Sparse prefill and speculative decoding with one draft model.

    Requests share only the weights. Each has its own caches, so several threads may generate and several streams may be
    open at once. A policy given by name keeps its learnt state across requests, which use it one at a time; a policy
    object is shared by concurrent requests.

    Parameters
    ----------
    target, draft : PreTrainedModel
        Loaded models, on one device, with transformers' default attention (which is replaced in place).
    tokenizer : optional
        The target's; None finds it where the models were loaded from. Without one only `input_ids` are taken, no text
        is made, and prompts are pruned in chunks alone (`PrefillConfig.granularity`).
    draft_tokenizer : optional
        The draft's; by default that of the draft's folder, or else the target's (`tokenizers.vocabulary.compare`).
    config, policy, draft_step, calibration : optional
        As for `from_pretrained`; the draft's folder is the one that it was loaded from.

    Raises
    ------
    ValueError
        For an incompatible pair, and for an invalid configuration or policy.

    Examples
    --------
    >>> from spec_stack import SpecStackGenerator
    >>> generator = SpecStackGenerator.from_pretrained()  # the pair embedded in the package, offline
    >>> generator.generate("def main():", max_tokens=8).finish_reason
    'length'
    """

    @refuses_unknown_options
    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        tokenizer: Any = None,
        *,
        config: SpecStackConfig | None = None,
        policy: str | Policy | None = None,
        draft_tokenizer: Any = None,
        draft_step: DraftStep = LoadConfig.draft_step,
        calibration: str | Path | bool | None = None,
    ) -> None:
        config = require_config(config, SpecStackConfig)
        tokenizer, draft_tokenizer = find_tokenizers(target, draft, tokenizer, draft_tokenizer)
        pair = ModelPair.assemble(target, draft, tokenizer, draft_tokenizer, config.prefill.positions, draft_step)
        prefill = calibrated(config.prefill, name_of_model(draft), calibration, pair)
        self._open: Engine | None = Engine(pair, replace(config, prefill=prefill), policy)

    @classmethod
    def over(cls, engine: Engine) -> SpecStackGenerator:
        """A generator that uses this engine."""
        generator = cls.__new__(cls)
        generator._open = engine
        return generator

    @classmethod
    @refuses_unknown_options
    def from_pretrained(
        cls,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        precision: str = LoadConfig.precision,
        draft_precision: str = LoadConfig.draft_precision,
        device: str | None = None,
        config: SpecStackConfig | None = None,
        policy: str | Policy | None = None,
        prepack_linears: bool = True,
        draft_step: DraftStep = LoadConfig.draft_step,
        calibration: str | Path | bool | None = None,
        device_map: DeviceMap | None = None,
        revision: str | None = HubConfig.revision,
        draft_revision: str | None = HubConfig.draft_revision,
        token: str | bool | None = None,
        trust_remote_code: bool = HubConfig.trust_remote_code,
    ) -> SpecStackGenerator:
        """Load a pair.

        Parameters
        ----------
        target, draft : str or Path, optional
            Local folders or hub ids; by default the pair embedded in the package. An adapter's folder (LoRA)
            is its base model with the adapter merged into it, for which peft is needed. A GGUF file is named by its
            path, or owner/name/file.gguf on the hub, for which the extra `gguf` is needed.
        precision, draft_precision : {"auto", "fp32", "fp16", "bf16", "int8", "nf4"}
            Of the weights (see `LoadConfig`); the last two need the extra `quantized`.
        device : str, optional
            "cpu", "cuda", "cuda:1", …; None takes CUDA where there is one.
        config : SpecStackConfig, optional
            Default pruning and drafting of all calls.
        policy : str or Policy, optional
            Default policy, which chooses gamma; the configuration's by default.
        prepack_linears : bool
            Prepack weights for the CPU where possible; the model can then not be trained or copied.
        draft_step : {"auto", "eager", "static", "compiled"}
            How the draft's steps and the verifications run (see `LoadConfig`): "static" in fixed shapes, on CUDA in
            graphs; "compiled" with the draft compiled too, whose first load takes minutes. "auto" is static
            on CUDA and eager on a CPU.
        calibration : str, Path or bool, optional
            A file from `spec-stack calibrate` for this pair. It replaces defaults of `PrefillConfig`; values set in
            `config` stay. None uses the one that is saved for this draft, or else the one shipped for it, if any;
            False uses none. "auto" makes one where there is none: a few short prompts choose the scoring heads, once.
        device_map : str or mapping, optional
            Placement of the target's modules by transformers and accelerate, instead of `device`. A name ("auto")
            applies to the draft too.
        revision, draft_revision : str, optional
            Branch, tag or commit of each checkpoint.
        token : str or bool, optional
            Hub token for gated checkpoints.
        trust_remote_code : bool
            Run a checkpoint's own code.

        Returns
        -------
        SpecStackGenerator

        Raises
        ------
        ValueError
            Before the weights are read, for a missing folder, an incompatible pair, an unknown precision, policy or
            device, or an unsupported precision.
        """
        config = require_config(config, SpecStackConfig)
        if isinstance(policy, str):
            # An unknown name is refused before the weights are read, which can take minutes.
            DecodeConfig(policy)
        pair = ModelPair.load(
            target,
            draft,
            precision=precision,
            draft_precision=draft_precision,
            device=device,
            prepack_linears=prepack_linears,
            hub=HubConfig(revision, draft_revision, token, trust_remote_code),
            device_map=device_map,
            positions=config.prefill.positions,
            draft_step=draft_step,
        )
        prefill = calibrated(config.prefill, draft, calibration, pair)
        return cls.over(Engine(pair, replace(config, prefill=prefill), policy))

    @property
    def engine(self) -> Engine:
        """The engine. Raises ValueError for a closed generator."""
        if self._open is None:
            raise ValueError("this generator is closed; make another one")
        return self._open

    @property
    def pair(self) -> ModelPair:
        """The models and their tokenizers."""
        return self.engine.pair

    @property
    def target(self) -> PreTrainedModel:
        return self.pair.target

    @property
    def draft(self) -> PreTrainedModel:
        return self.pair.draft

    @property
    def tokenizer(self) -> Any:
        """The target's; None for token ids alone."""
        return self.pair.tokenizer

    @property
    def config(self) -> SpecStackConfig:
        """The default configuration of calls, fixed at construction."""
        return self.engine.config

    def close(self) -> None:
        """Let go of the models, whose memory is free once no session or stream uses them."""
        self._open = None

    def __enter__(self) -> SpecStackGenerator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._open is None:
            return f"{type(self).__name__}(closed)"
        names = f"{name_of_model(self.target) or 'target'}, {name_of_model(self.draft) or 'draft'}"
        precisions = f"{self.pair.precision} with {self.pair.draft_precision}"
        return f"{type(self).__name__}({names}; {precisions} on {self.target.device})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a generator can be neither copied nor pickled: it lends locks, caches and maybe prepacked weights. "
            "Threads may share one; another process makes its own with from_pretrained"
        )

    def session(self, config: SessionConfig | None = None, ngram_cache: SharedNgramCache | None = None) -> Session:
        """A conversation with persistent caches (see `Session`).

        Parameters
        ----------
        config : SessionConfig, optional
            Recall of dropped text; None is the generator's.
        ngram_cache : SharedNgramCache, optional
            Other sessions' answers for look-ups (see `Session`).
        """
        return Session(self.engine, config, ngram_cache)

    def load_session(self, path: str | Path, config: SessionConfig | None = None) -> Session:
        """Load a session from a file of `Session.save`.

        Parameters
        ----------
        path : str or Path
            The file.
        config : SessionConfig, optional
            Recall of dropped text; None is the saved session's.

        Raises
        ------
        ValueError
            For an invalid file, and for a session of another pair, precision, tokenizer or `PrefillConfig`; the message
            names the difference.
        """
        session = self.session(config)
        saved = load_conversation(session.conversation, path, self.pair, self.config.prefill)
        session.config = config or saved
        return session

    def _begin(self, call: Call) -> tuple[Request, Generator[StepOutput, None, None]]:
        request = self.engine.plan(call)
        return request, self.engine.run(request)

    def _sample(self, calls: Sequence[Call]) -> list[GenerationResult]:
        with self.session(SessionConfig(recall=False)) as session:
            return session._sample(calls)


def calibrated(
    config: PrefillConfig,
    draft: str | Path | None,
    named: str | Path | bool | None,
    pair: ModelPair,
    is_pair: bool = True,
) -> PrefillConfig:
    """The configuration, completed by a calibration if there is one. A named calibration that does not fit the pair is
    an error; a saved one is skipped for the shipped one. is_pair: whether the pair has a target of its own."""
    source = ASSETS / "draft" if draft is None else draft
    calibration, problem = choose_calibration(
        source,
        named,
        (text_config(pair.target.config) if is_pair else None, text_config(pair.draft.config)),
        lambda: sketch(pair.draft.get_input_embeddings().weight),
    )
    if problem:
        warn_caller(f"the saved calibration is left aside: {problem}")
    if calibration is None and named == AUTO:
        from spec_stack.calibrate.search import calibrate_at_load

        calibration = calibrate_at_load(pair, file_of(source))
    return config if calibration is None else calibration.complete(config)
