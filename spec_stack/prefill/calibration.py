"""A calibration and its file: the settings for a draft and target, with the measurements behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from spec_stack.config import PrefillConfig
from spec_stack.settings.checks import plain

FILE_NAME = "spec_stack_calibration.json"
VERSION = 4
# What a calibration decides; everything else stays as it was configured.
CHOSEN = (
    "keep_rate",
    "granularity",
    "scoring_queries",
    "look_ahead",
    "min_prompt_tokens",
    "draft_window",
    "draft_sinks",
    "scoring_heads",
    "first_scoring_layer",
    "head_reduction",
    "scorer",
    "max_dropped_attention",
)


@dataclass(frozen=True)
class Calibration:
    """The settings that were chosen, for which pair, and by what.

    Attributes
    ----------
    settings
        Values of PrefillConfig, by name; of those in `CHOSEN`.
    target, draft
        What identifies the models (see `fingerprint`); an empty target is any.
    margin
        Recall that was given up for a smaller share, at most.
    weights
        A sketch of the draft's weights (`prefill.shipped.sketch`).
    notes
        What the user should know, in sentences.
    seconds
        That the last call took.
    num_prompts, unfinished
        How many prompts were judged, and how many were left when the time was over.
    origin
        Where it is from, in words; no part of the file.
    """

    settings: Mapping[str, Any]
    target: Mapping[str, Any]
    draft: Mapping[str, Any]
    margin: float
    weights: Sequence[float] = ()
    notes: Sequence[str] = ()
    seconds: float = 0.0
    num_prompts: int = 0
    unfinished: int = 0
    origin: str = field(default="", compare=False)

    def apply(self) -> PrefillConfig:
        """The calibrated settings, and the defaults of the others."""
        return PrefillConfig(**self.settings)

    def complete(self, config: PrefillConfig) -> PrefillConfig:
        """The configuration with the calibrated settings for every field that was not given."""
        chosen = {name: value for name, value in self.settings.items() if name not in config.given}
        return replace(config, **chosen, calibrated_by=self.origin)

    def check(self, target: Any, draft: Any) -> str:
        """Why it does not fit models of these transformers configurations (None for any); empty where it does."""
        for role, made_for, config in (("target", self.target, target), ("draft", self.draft, draft)):
            given = fingerprint(config)
            if config is not None and made_for and dict(made_for) != given:
                return f"it was made for another {role}: {dict(made_for)}, not {given}"
        return ""

    def save(self, path: str | Path) -> Path:
        """Write it to a file, or into a folder under its usual name; the file's path."""
        file = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
        values = {name: value for name, value in asdict(self).items() if name != "origin"}
        file.write_text(json.dumps({"version": VERSION, **values}) + "\n", encoding="utf-8")
        return file

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read it from a file or folder. Raises ValueError, naming the file, for a damaged file or another version."""
        file = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            version = values.pop("version")
            if version != VERSION:
                raise ValueError(f"it is of version {version}, made for other scoring queries; calibrate again")
            # Earlier files name settings that are gone, as None.
            given = {name: plain(value) for name, value in values["settings"].items() if value is not None}
            if unknown := set(given) - set(CHOSEN):
                raise ValueError(f"it sets {sorted(unknown)}; calibrate again")
            values["settings"] = {name: given.get(name) for name in values["settings"] if name in CHOSEN}
            values["weights"] = tuple(values["weights"])
            values["origin"] = file.name
            # Earlier files also hold tables of what was measured.
            calibration = cls(**{entry.name: values[entry.name] for entry in fields(cls) if entry.name in values})
            calibration.apply()
        except KeyError as error:
            raise ValueError(f"cannot take {file} for a calibration: it has no {error}") from error
        except OSError as error:
            raise ValueError(f"cannot read the calibration {file}: {error.strerror}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"cannot take {file} for a calibration: {error}") from error
        return calibration


def fingerprint(config: Any) -> dict[str, Any]:
    """The identifying shape of a model, from its transformers text configuration."""
    names = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    return {name: getattr(config, name, None) for name in names}


def describe_setting(config: PrefillConfig) -> str:
    """A configuration's differences from the defaults, in few words; without the kept share."""
    named = [name for name in CHOSEN if name not in ("keep_rate", "min_prompt_tokens", "scoring_heads")]
    default = PrefillConfig()
    changed = [f"{name}={getattr(config, name)}" for name in named if getattr(config, name) != getattr(default, name)]
    heads = [f"{len(config.scoring_heads)} heads"] if config.scoring_heads else []
    return ", ".join(changed + heads) or "default"
