"""The page of options is made from the code: it shows everything public, and nothing that is not there."""

from __future__ import annotations

import re
from importlib import import_module

import spec_stack
from tests.support.pages import ROOT

SHOWN = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "options.md").read_text(encoding="utf-8"), re.M)


def test_everything_on_the_page_is_there_and_documented() -> None:
    for path in SHOWN:
        module, _, name = path.rpartition(".")
        assert getattr(import_module(module), name).__doc__, path


def test_every_public_name_is_on_the_page() -> None:
    public = {name: getattr(spec_stack, name) for name in spec_stack.__all__}
    homes = {f"{shown.__module__}.{name}" for name, shown in public.items()}
    # What a policy is told has a page of its own, docs/add-a-policy.md.
    of_policies = {f"spec_stack.controller.base.{name}" for name in ("DraftSignals", "Policy", "StepContext")}
    assert homes - set(SHOWN) == of_policies
