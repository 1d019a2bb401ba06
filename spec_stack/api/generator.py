"""SpecStackGenerator: one draft model for both phases, over transformers models."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spec_stack.api.answering import GenerationMixin
from spec_stack.api.session import Session
from spec_stack.api.unknown_options import refuses_unknown_options
from spec_stack.config import HubConfig, LoadConfig, SessionConfig, SpecStackConfig
from spec_stack.controller.base import Policy
from spec_stack.controller.registry import policy_class
from spec_stack.decode.lookup_index import TextMemory
from spec_stack.engine.engine import Engine
from spec_stack.engine.options import Call
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.request import Request
from spec_stack.hf.architectures import text_config
from spec_stack.hf.loading import ASSETS, DeviceMap
from spec_stack.hf.precision import precision_named
from spec_stack.hf.prompt import Message
from spec_stack.hf.sources import name_file
from spec_stack.prefill.shipped import choose_calibration, sketch
from spec_stack.types import GenerationResult, StepOutput
from spec_stack.warning import warn_caller

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SpecStackGenerator(GenerationMixin):
    """Sparse prefill and speculative decoding with one draft model.

    Requests share only the weights: each has its own caches, so several threads may generate, and several streams may
    be open, at once. A policy by name keeps what it learns from request to request, and no two requests have it at
    once; one handed in as an object is shared by the requests that use it.

    Parameters
    ----------
    target, draft : PreTrainedModel
        Loaded models, on one device, with transformers' default attention (which is replaced in place).
    tokenizer : optional
        The target's. Without one only `input_ids` are taken and no text is made.
    precision, draft_precision : str, optional
        Names of the models' precisions; found out where they are not given.
    config : SpecStackConfig, optional
        How prompts are pruned and tokens drafted, for all calls that do not say otherwise.
    policy : str or Policy, optional
        What chooses gamma in calls that name none; the configuration's by default.
    predictors : mapping of str to str or Path, optional
        Files of trained predictors, by the name of the policy that is to use them.
    draft_tokenizer : optional
        The draft's; without one it is taken to be the target's (`tokenizers.vocabulary.compare`).

    Raises
    ------
    ValueError
        For a pair that does not fit together, and a configuration or a policy that is none.

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
        precision: str = "",
        draft_precision: str = "",
        config: SpecStackConfig | None = None,
        policy: str | Policy | None = None,
        predictors: Mapping[str, str | Path] | None = None,
        draft_tokenizer: Any = None,
    ) -> None:
        config = _checked(config)
        pair = ModelPair.assemble(
            target,
            draft,
            tokenizer,
            draft_tokenizer,
            precision,
            draft_precision,
            predictors,
            config.prefill.positions,
        )
        self._set_up(Engine(pair, config, policy))

    def _set_up(self, engine: Engine) -> None:
        self.engine, self.pair = engine, engine.pair
        self.target, self.draft, self.tokenizer = engine.pair.target, engine.pair.draft, engine.pair.tokenizer
        self.vocabulary = engine.pair.vocabulary
        self.precision, self.draft_precision = engine.pair.precision, engine.pair.draft_precision

    @classmethod
    def over(cls, engine: Engine) -> SpecStackGenerator:
        """A generator that uses this engine."""
        generator = cls.__new__(cls)
        generator._set_up(engine)
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
        prepack_linears: bool | None = None,
        calibration: str | Path | bool | None = None,
        dtype: str | torch.dtype | None = None,
        device_map: DeviceMap | None = None,
        revision: str | None = HubConfig.revision,
        draft_revision: str | None = HubConfig.draft_revision,
        token: str | bool | None = None,
        trust_remote_code: bool = HubConfig.trust_remote_code,
        gguf_file: str | None = None,
        draft_gguf_file: str | None = None,
    ) -> SpecStackGenerator:
        """Load a pair.

        Parameters
        ----------
        target, draft : str or Path, optional
            Local folders or hub ids; with neither named, the pair embedded in the package. An adapter's folder (LoRA)
            is its base model with the adapter merged into it, for which peft is needed. A GGUF file is named by its
            path, or owner/name/file.gguf on the hub, for which the extra `gguf` is needed.
        precision, draft_precision : {"auto", "fp32", "fp16", "bf16", "int8", "nf4"}
            Of the weights (see `LoadConfig`); the last two need the extra `quantized`.
        device : str, optional
            "cpu", "cuda", "cuda:1", …; None takes CUDA where there is one.
        config : SpecStackConfig, optional
            How prompts are pruned and tokens drafted, for all calls that do not say otherwise.
        policy : str or Policy, optional
            What chooses gamma in calls that name none; the configuration's by default.
        prepack_linears : bool, optional
            Lay weights out for the CPU beforehand, which makes them unfit for saving; None does so wherever it works.
        calibration : str, Path or bool, optional
            A file that `spec-stack calibrate` made for this pair. It takes the place of defaults of `PrefillConfig`;
            what `config` sets otherwise stays. None takes the one that lies in the draft's folder, or else the one that
            ships for this draft, if any; False takes none.
        dtype : str or torch.dtype, optional
            `precision` as transformers calls it: "bfloat16", torch.float16, …
        device_map : str or mapping, optional
            In place of `device`: where transformers, with accelerate, puts the parts of the target, and those of the
            draft where it is a name ("auto").
        revision, draft_revision : str, optional
            Branch, tag or commit of each.
        token : str or bool, optional
            For checkpoints that need one.
        trust_remote_code : bool
            Run code that comes with a checkpoint.
        gguf_file, draft_gguf_file : str, optional
            The GGUF file that is meant in the folder or hub id of each.

        Returns
        -------
        SpecStackGenerator

        Raises
        ------
        ValueError
            For what a caller can change: a missing folder, an unfit pair, an unknown precision, policy or device, a
            precision that cannot be had here. All of it before the weights are read.
        """
        chosen = policy if policy is not None else _checked(config).decode.policy
        if isinstance(chosen, str):
            # Before the weights are read, which can take minutes.
            policy_class(chosen)
        if dtype is not None:
            if precision != LoadConfig.precision:
                raise ValueError("give precision or dtype, not both; they mean the same")
            precision = precision_named(dtype)
        target, draft = name_file(target, gguf_file), name_file(draft, draft_gguf_file)
        pair = ModelPair.load(
            target,
            draft,
            precision=precision,
            draft_precision=draft_precision,
            device=device,
            prepack_linears=prepack_linears,
            hub=HubConfig(revision, draft_revision, token, trust_remote_code),
            device_map=device_map,
            positions=_checked(config).prefill.positions,
        )
        return cls.over(Engine(pair, _calibrated(pair, config, draft, calibration), policy))

    @property
    def config(self) -> SpecStackConfig:
        """The configuration that holds where a call says nothing else. It is settled when the generator is made."""
        return self.engine.config

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a generator can be neither copied nor pickled: it lends locks, caches and maybe prepacked weights. "
            "Threads may share one; another process makes its own with from_pretrained"
        )

    def session(self, config: SessionConfig | None = None, memory: TextMemory | None = None) -> Session:
        """A conversation whose caches live on from call to call (see `Session`).

        Parameters
        ----------
        config : SessionConfig, optional
            What it keeps and restores; None is the generator's.
        memory : TextMemory, optional
            Answers of other sessions in which look-ups look too (see `Session`).
        """
        return Session(self.engine, config, memory)

    def load_session(self, path: str | Path, config: SessionConfig | None = None) -> Session:
        """A session from a file of `Session.save`, which goes on as the saved one would have.

        Parameters
        ----------
        path : str or Path
            The file.
        config : SessionConfig, optional
            What it keeps and restores; None is what the saved one did.

        Raises
        ------
        ValueError
            For a file that is no session, and where it was made with another pair, precision, tokenizer or
            `PrefillConfig` than this generator's; the message names what differs.
        """
        return Session.load(self.engine, path, config)

    def generate_all(
        self,
        prompts: Sequence[str] | None = None,
        *,
        messages: Sequence[Sequence[Message]] | None = None,
        input_ids: Sequence[Sequence[int]] | torch.Tensor | None = None,
        attention_mask: Sequence[Sequence[int]] | torch.Tensor | None = None,
        share: bool = False,
        **options: Any,
    ) -> list[GenerationResult]:
        """Answer several prompts, one after the other, each as `generate` does.

        What prompts have in common is prefilled once where a store keeps it (`StoreConfig`), which changes no answer.
        This is no batch: that is what the server is for.

        Parameters
        ----------
        prompts : sequence of str, optional
            Texts to go on with.
        messages : sequence of chats, optional
            In place of them.
        input_ids, attention_mask : sequence or torch.Tensor, optional
            Rows of token ids in their place, and where they are padded.
        share : bool
            Answer them as turns of one session: what a prompt has in common with the one before is prefilled once, and
            pruned for the first that had it. That is sooner, and the answers hang on the order of the prompts.
        **options
            Those of `generate`, the same for all.

        Returns
        -------
        list of GenerationResult
            In the order of the prompts.

        Raises
        ------
        ValueError
            As `generate` does, when it is the prompt's turn.
        """
        sources: dict[str, Any] = {"prompt": prompts, "messages": messages, "input_ids": input_ids}
        given = [(name, values) for name, values in sources.items() if values is not None]
        if len(given) != 1 or isinstance(prompts, str):
            raise ValueError("give exactly one of prompts, messages or input_ids, and a list of it")
        name, values = given[0]
        several = [{name: value} for value in values]
        if attention_mask is not None:
            several = [one | {"attention_mask": mask} for one, mask in zip(several, attention_mask, strict=True)]
        if not share:
            return [self.generate(**one, **options) for one in several]
        with self.session() as session:
            session.tells_of_beginnings = False
            return [session.generate(**one, **options) for one in several]

    def _plan(self, call: Call) -> Request:
        return self.engine.plan(call)

    def _sample(self, calls: Sequence[Call]) -> list[GenerationResult]:
        with self.session(SessionConfig(restore=False)) as session:
            return session._sample(calls)

    def _run(self, request: Request) -> Generator[StepOutput, None, None]:
        return self.engine.run(request)

    def clear_store(self) -> None:
        """Forget the prompts that `StoreConfig.max_tokens` has kept, and free their memory."""
        self.engine.store.clear()


def _calibrated(
    pair: ModelPair, config: SpecStackConfig | None, draft: str | Path | None, named: str | Path | bool | None
) -> SpecStackConfig:
    """The configuration, completed by a calibration if there is one.

    A named calibration that does not fit the pair is an error; one beside the draft is skipped for the shipped one.
    """
    config = _checked(config)
    calibration, problem = choose_calibration(
        ASSETS / "draft" if draft is None else draft,
        named,
        (text_config(pair.target.config), text_config(pair.draft.config)),
        lambda: sketch(pair.draft.get_input_embeddings().weight),
    )
    if problem:
        warn_caller(f"the calibration beside the draft is left aside: {problem}")
    return config if calibration is None else replace(config, prefill=calibration.complete(config.prefill))


def _checked(config: SpecStackConfig | None) -> SpecStackConfig:
    if config is not None and not isinstance(config, SpecStackConfig):
        raise ValueError(f"config must be a SpecStackConfig, got {type(config).__name__}")
    return config or SpecStackConfig()
