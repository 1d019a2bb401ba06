"""Nothing that a user could paste installs a name that others may register, or from an account that is nobody's yet."""

from __future__ import annotations

import re

from spec_stack.config import how_to_install
from tests.support.pages import ROOT

FOLDERS = ("spec_stack", "docs", "experiments", "examples", ".github")
SUFFIXES = {".py", ".md", ".sh", ".yml", ".yaml", ".cff"}
FILES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(each for folder in FOLDERS for each in (ROOT / folder).rglob("*"))]
    if path.suffix in SUFFIXES
)
# An installer's line with the package's name where a requirement stands, or any command with the placeholder.
_BY_NAME = re.compile(r"\b(?:pip3?|pipx|uvx?|poetry|conda)\b.*\b(?:install|add|run|tool)\b.*[ '\"]spec[-_]stack\b")
_FROM_NOBODY = re.compile(r"\b(?:pip3?|pipx|uv|uvx|git|docker|curl|wget) .*OWNER")


def test_the_patterns_find_what_they_are_for() -> None:
    assert _BY_NAME.search("pip install 'spec-stack[serve]'")
    assert _BY_NAME.search("RUN python3 -m pip install --no-deps spec-stack")
    assert _BY_NAME.search("uv add spec_stack")
    assert _FROM_NOBODY.search('pip install "x @ git+https://github.com/OWNER/spec_stack"')
    assert _FROM_NOBODY.search("git clone https://github.com/OWNER/spec_stack")
    assert not _BY_NAME.search("pip install '.[serve]' in a clone")


def test_no_command_installs_by_a_name_that_is_nobodys() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): match[0]
        for path in FILES
        for pattern in (_BY_NAME, _FROM_NOBODY)
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == {}


def test_hints_name_extras_that_there_are() -> None:
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    hinted = {
        name
        for path in FILES
        if path.suffix == ".py"
        for name in re.findall(r"how_to_install\(['\"]([\w-]+)['\"]\)", path.read_text(encoding="utf-8"))
    }
    assert len(hinted) > 4
    assert all(re.search(rf"^{name} = \[", extras, re.MULTILINE) for name in hinted)
    assert how_to_install("serve") == "pip install '.[serve]' in a clone of the package"
