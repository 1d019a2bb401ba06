"""The tour of the code names files that are there, and the map for contributors every package."""

from __future__ import annotations

import re

from tests.support.pages import ROOT

PAGE = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_file_on_the_way_to_the_first_token_is_there() -> None:
    tour = PAGE.partition("## From `generate()` to the first token")[2].partition("\n## ")[0]
    named = re.findall(r"spec_stack/[\w/]+\.py", tour)
    assert len(named) > 8
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_the_map_for_contributors_has_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "spec_stack").glob("*/__init__.py")}
    parts = re.search(r"^    spec_stack/\n(.*?)^    experiments/", CONTRIBUTING, flags=re.MULTILINE | re.DOTALL)
    assert parts is not None
    assert set(re.findall(r"(\w+)/", parts[1])) - {"assets"} == packages
