"""The settings of a server: flags, a file, an environment variable. No SGLang import."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from spec_stack.config import MAX_GAMMA, DecodeConfig, PrefillConfig, SessionConfig
from spec_stack.controller.base import Policy
from spec_stack.controller.registry import BATCH_POLICIES, make_batch_policy
from spec_stack.http.config import HttpConfig
from spec_stack.prefill.cost import with_threshold
from spec_stack.prefill.shipped import AUTO, choose_calibration, sketch_of_files
from spec_stack.settings.checks import check_fields, require, require_int
from spec_stack.settings.options import documented, meaning, option

logger = logging.getLogger(__name__)
NAME = "SPEC_STACK"
ENVIRONMENT = "SPEC_STACK_SGLANG"
MOST_POOL_TOKENS = 65_536
FollowUp = Literal["recall", "freeze", "afresh"]
"""Rules for the text of earlier turns. freeze: the earlier selection stays. recall: so it does, and dropped text that
is relevant to the new turn is recalled. afresh: the whole prompt is selected anew."""

FOLLOW_UPS: tuple[str, ...] = get_args(FollowUp)


@documented
@dataclass(frozen=True)
class ServerConfig:
    """The server's defaults. Raises ValueError, saying what to change."""

    prefill: PrefillConfig = field(
        default_factory=lambda: PrefillConfig(positions="contiguous"),
        metadata={
            "help": "how prompts are scored and pruned; under on_scoring_failure='raise' an error in scoring ends "
            "the server, which is for tests"
        },
    )
    scoring_model: str | None = option(
        None,
        "a small model that scores prompts and drafts nothing, while SGLang's own --speculative-algorithm, or none, "
        "decodes; under SPEC_STACK the draft scores",
    )
    policy: str = option("throughput", f"policy that chooses gamma for the batch: {', '.join(BATCH_POLICIES)}")
    policy_options: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "the policy's options, as `make_batch_policy` takes them"}
    )
    gammas: tuple[int, ...] = option(
        (0, 1, 2, 4, 8),
        "allowed gammas; the launch allocates buffers, and on CUDA captures graphs, for each; 0 is plain decoding",
    )
    max_gamma_by_batch_size: Mapping[int, int] = field(
        default_factory=lambda: {9: 4, 33: 2},
        metadata={
            "help": "batch size to the largest gamma from it on. A step's graphs are captured for the batch "
            "sizes at which its gamma may be used, so this is also what the graphs cost in memory and launch time"
        },
    )
    prefill_decode_interval: int = option(
        1,
        "decode steps between two prefill batches, and between a prefill batch and a part of a scoring, while requests "
        "run on a server that prunes; `--prefill-decode-interval` overrides it. 0 prefills all chunks of a prompt "
        "in a row: the shortest time to first token, and the longest wait of running requests",
        0,
    )
    calibration: str | None = option(
        None,
        "a file of `spec-stack calibrate` for this pair, or its folder, whose settings replace prefill's defaults, "
        "or 'none'; without it the file in the draft's folder, or the shipped one",
    )
    follow_up: FollowUp = option("recall", f"rule for the text of earlier turns: {', '.join(FOLLOW_UPS)}")
    recall: SessionConfig = field(
        default_factory=SessionConfig,
        metadata={"help": "recall of dropped text under 'recall', with a session's options"},
    )
    draft_pool_tokens: int | None = option(
        None,
        "capacity, in tokens, of the draft's own KV pool; the default is as many as fit into a tenth of the memory "
        f"that is free after the weights are loaded, and {MOST_POOL_TOKENS:,} at most. A prompt "
        "longer than that is prefilled densely. SGLang sizes its own pools by the remaining memory",
        1,
    )

    audit_rate: float = option(
        0.0,
        "share of pruned requests that are answered again, shortly and greedily, from the whole and from the pruned "
        "prompt, while no client of the HTTP server waits; 0 audits nothing",
    )
    audit_max_loss: float | None = option(None, meaning(HttpConfig, "audit_max_loss"))

    def __post_init__(self) -> None:
        check_fields(self)
        self.audits.check_server()
        require(isinstance(self.gammas, tuple), f"gammas must be a list, got {self.gammas!r}")
        for gamma in self.gammas:
            require_int("a gamma of gammas", gamma, 0, MAX_GAMMA)
        require(
            any(self.gammas), "gammas must hold a number over 0; without drafting, leave --speculative-algorithm out"
        )
        object.__setattr__(self, "gammas", tuple(sorted(set(self.gammas))))
        for size, gamma in self.max_gamma_by_batch_size.items():
            require_int("a batch size of max_gamma_by_batch_size", size, 1)
            require_int("a gamma of max_gamma_by_batch_size", gamma, 0)
        for name in ("calibration", "scoring_model"):
            value = getattr(self, name)
            require(value is None or (isinstance(value, str) and value != ""), f"{name} must be a path, got {value!r}")
        if self.scoring_model is not None and self.prefill.sparse_prefill == "draft_only":
            raise ValueError("sparse_prefill 'draft_only' needs SPEC_STACK's own draft; leave scoring_model out")
        self.make_policy(self.policy)

    @property
    def audits(self) -> HttpConfig:
        return HttpConfig(audit_rate=self.audit_rate, audit_max_loss=self.audit_max_loss)

    @property
    def prunes(self) -> bool:
        """Return whether prompts are pruned by default, as far as the models allow it."""
        return self.prefill.sparse_prefill in ("auto", "on") and self.prefill.keep_rate != 1

    @property
    def num_draft_layers(self) -> int | None:
        """How many of the draft's first layers read prompts; None for all, which its check needs."""
        return None if self.prefill.max_dropped_attention is not None else self.prefill.num_scoring_layers

    def gammas_at(self, batch_size: int) -> tuple[int, ...]:
        """The gammas that a batch of this size may use; the smallest one is always allowed."""
        caps = [gamma for size, gamma in self.max_gamma_by_batch_size.items() if batch_size >= size]
        allowed = tuple(gamma for gamma in self.gammas if gamma <= min(caps, default=self.gammas[-1]))
        return allowed or self.gammas[:1]

    def sizes_for(self, gamma: int, batch_sizes: Sequence[int]) -> list[int]:
        """Those of the batch sizes that may use this gamma, for which alone its graphs are captured."""
        return [size for size in batch_sizes if gamma in self.gammas_at(size)]

    def make_policy(self, name: str) -> Policy:
        """A fresh policy that keeps to `gammas`. Raises ValueError for one that cannot decide for a batch."""
        drafting = tuple(gamma for gamma in self.gammas if gamma)
        by_name: dict[str, dict[str, Any]] = {
            "throughput": {"gammas": self.gammas},
            "ema": {"gammas": drafting, "max_gamma": drafting[-1]},
            "heuristic": {"max_gamma": drafting[-1], "start": min(DecodeConfig.gamma, drafting[-1])},
            "fixed": {"gamma": max(gamma for gamma in drafting if gamma <= max(DecodeConfig.gamma, drafting[0]))},
        }
        # A user's own policy does not know the gammas: its choice is cut to them.
        options = by_name.get(name, {})
        if name == self.policy:
            options.update(self.policy_options)
        policy = make_batch_policy(name, **options)
        if name == "fixed" and options["gamma"] not in self.gammas:
            raise ValueError(
                f"gamma {options['gamma']} is not among the gammas the server is launched with: {self.gammas}"
            )
        return policy

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ServerConfig:
        """From flags or a file: the fields above (prefill and recall as mappings), and prefill's own flags."""
        values = dict(values)
        idle = [name for name in _OF_DRAFTING if name in values]
        if values.get("scoring_model") is not None and idle:
            raise ValueError(
                f"{', '.join(idle)} set how SPEC_STACK drafts, and with a scoring_model it does not; leave them out"
            )
        prefill = dict(_mapping("prefill", values.pop("prefill", {})))
        prefill.update({name: values.pop(name) for name in _OF_PREFILL if name in values})
        recall = dict(_mapping("recall", values.pop("recall", {})))
        _refuse_unknown("", values, [entry.name for entry in fields(cls)])
        _refuse_unknown("recall.", recall, [entry.name for entry in fields(SessionConfig)])
        for name in ("policy_options", "max_gamma_by_batch_size"):
            if name in values:
                # JSON has text for keys.
                items = _mapping(name, values[name]).items()
                values[name] = {int(key) if str(key).isdigit() else key: value for key, value in items}
        return cls(prefill=_prefill_config(prefill), recall=SessionConfig(**recall), **values)

    @classmethod
    def from_environment(cls) -> ServerConfig:
        """The flags of this launch as its other processes inherit them; flags override a file's values."""
        flags = _read_environment()
        if path := flags.pop("config", None):
            read = partial(Path(path).expanduser().read_text, encoding="utf-8")
            flags = {**_parse(f"--spec-stack-config {path}", read), **flags}
        return cls.from_mapping(flags)


def with_calibration(
    config: ServerConfig, draft: str, target_config: Any, draft_config: Any, on_gpu: bool = False
) -> ServerConfig:
    """The settings with calibrated values for those that have defaults, and the shortest prompt for which pruning pays.

    target_config, draft_config: their Transformers text configurations. on_gpu: launches of kernels count. Raises
    ValueError for a named calibration that does not fit these models; one beside the draft is skipped then.
    """
    named = False if config.calibration == "none" else config.calibration
    configs = target_config, draft_config
    found, problem = choose_calibration(draft, named, configs, lambda: sketch_of_files(draft))
    if problem:
        logger.warning("%s: the saved calibration is left aside: %s", NAME, problem)
    if found is None and named == AUTO:
        raise ValueError(
            f"no calibration of {draft} is saved; `spec-stack calibrate --quick --draft {draft}` makes one"
        )
    if found is not None:
        logger.info("%s: prompts are pruned as calibrated by %s", NAME, found.origin)
        prefill = found.complete(config.prefill)
        if prefill.draft_window is not None:
            logger.info("%s: the draft attends to whole prompts, whatever draft_window was calibrated", NAME)
        config = replace(config, prefill=replace(prefill, draft_window=None))
    if not config.prunes:
        return config
    return replace(config, prefill=with_threshold(config.prefill, *configs, on_gpu))


def _prefill_config(values: dict[str, Any]) -> PrefillConfig:
    if "draft_kv_budget" in values and values.get("sparse_prefill") != "draft_only":
        raise ValueError(
            "draft_kv_budget are those of sparse_prefill 'draft_only'; add it, or leave draft_kv_budget out"
        )
    for name in ("draft_window", "draft_sinks"):
        if values.get(name) is not None:
            why = "a server's draft attends to the whole prompt, which is faster"
            raise ValueError(f"prefill.{name} is for Python: {why}; leave it out")
    if values.get("sparse_prefill") == "draft_only" and values.get("max_dropped_attention") is not None:
        raise ValueError(
            "max_dropped_attention checks pruned prompts, and sparse_prefill 'draft_only' prunes none; leave it out"
        )
    names = [entry.name for entry in fields(PrefillConfig) if not entry.kw_only and entry.name != "positions"]
    _refuse_unknown("prefill.", values, names)
    return PrefillConfig(**values, positions="contiguous")


class _Remember(argparse.Action):
    """Stores a flag's value in the environment, which SGLang's other processes inherit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        os.environ[ENVIRONMENT] = json.dumps({**_read_environment(), self.dest.removeprefix("spec_stack_"): values})


def _switch(text: str) -> str:
    """An unquoted `off` or `on` in a YAML file arrives as a boolean."""
    return {"false": "off", "true": "on"}.get(text.lower(), text)


# Without effect with a scoring model.
_OF_DRAFTING = ("policy", "policy_options", "gammas", "max_gamma_by_batch_size", "draft_kv_budget")
# Parser and metavar of each flag; default and help are the field's.
_FLAGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "keep_rate": (float, "SHARE"),
    "min_prompt_tokens": (int, "TOKENS"),
    "sparse_prefill": (_switch, "MODE"),
    "max_dropped_attention": (float, "SHARE"),
    "draft_kv_budget": (int, "SLOTS"),
    "scoring_model": (str, "PATH"),
    "policy": (str, "NAME"),
    "gammas": (int, "N"),
    "calibration": (str, "FILE"),
    "follow_up": (str, "RULE"),
    "draft_pool_tokens": (int, "TOKENS"),
    "audit_rate": (float, "SHARE"),
    "audit_max_loss": (float, "SHARE"),
}
_OF_PREFILL = ("keep_rate", "min_prompt_tokens", "sparse_prefill", "max_dropped_attention", "draft_kv_budget")


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "spec_stack", "with --speculative-algorithm SPEC_STACK, or with --spec-stack-scoring-model"
    )
    # SUPPRESS keeps them out of the namespace: SGLang's own record has no such fields.
    common: dict[str, Any] = {"action": _Remember, "default": argparse.SUPPRESS}
    for name, (read, metavar) in _FLAGS.items():
        config: type = PrefillConfig if name in _OF_PREFILL else ServerConfig
        default = getattr(config, name)
        several: dict[str, Any] = {"nargs": "+"} if name == "gammas" else {}
        if several:
            default = " ".join(map(str, default))
        shown = meaning(config, name) + ("" if default is None else f" (default {default})")
        flag = f"--spec-stack-{name.replace('_', '-')}"
        group.add_argument(flag, type=read, metavar=metavar, help=shown.replace("%", "%%"), **several, **common)
    settings = ", ".join([*_OF_PREFILL, *(entry.name for entry in fields(ServerConfig))])
    group.add_argument(
        "--spec-stack-config", metavar="FILE", help=f"JSON with any of: {settings}; flags override it", **common
    )


def _read_environment() -> dict[str, Any]:
    return _parse(f"the environment variable {ENVIRONMENT}", lambda: os.environ.get(ENVIRONMENT, "{}"))


def _parse(name: str, read: Callable[[], str]) -> dict[str, Any]:
    try:
        return dict(_mapping(name, json.loads(read())))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{name} must hold a JSON object: {error}") from error


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a JSON object, got {value!r}")
    return value


def _refuse_unknown(prefix: str, values: Mapping[str, Any], known: list[str]) -> None:
    unknown = [prefix + name for name in values if name not in known]
    if unknown:
        raise ValueError(f"unknown setting {', '.join(unknown)}; known: {', '.join(prefix + name for name in known)}")
