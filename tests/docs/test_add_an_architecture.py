"""The page "Add an architecture", followed word for word in a copy of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT, Block, blocks, copy_repository, run_python

PAGE = ROOT / "docs" / "add-an-architecture.md"
# "spec_stack/hf/architectures.py: in SUPPORTED" is the line behind which the block goes.
_TITLE = re.compile(r"(?P<file>[\w/.]+): in (?:the import of (?P<package>\w+)|(?P<table>\w+))")


def _insert(block: Block, root: Path) -> None:
    title = _TITLE.fullmatch(block.title)
    assert title is not None, block.title
    package, table = title["package"], title["table"]
    opening = re.compile(rf"^(from {package} import \()$" if package else rf"^({table}\b.*\{{)$", flags=re.M)
    file = root / title["file"]
    entry = block.code.rstrip()
    text, num_places = opening.subn(lambda match: f"{match[1]}\n{entry}", file.read_text(encoding="utf-8"))
    assert num_places == 1, block.title
    file.write_text(text, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.nightly
def test_the_page_adds_an_architecture_whose_every_check_passes(tmp_path: Path) -> None:
    copy_repository(tmp_path, "spec_stack", "tests", "experiments", "docs")
    steps = [block for block in blocks(PAGE) if block.title]
    assert len(steps) == 3
    for step in steps:
        _insert(step, tmp_path)
    where = run_python(tmp_path, "-c", "import spec_stack; print(spec_stack.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path)
    run_python(tmp_path, "-m", "tests.support.support_table", "--write")
    assert "| OLMo2 | exact | exact | exact |" in (tmp_path / "docs" / "support.md").read_text(encoding="utf-8")
    chosen = "OLMo2 or matrix"
    output = run_python(
        tmp_path, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/hf/test_architectures.py", "-k", chosen
    )
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None, output
    assert int(passed[1]) >= 12, output
