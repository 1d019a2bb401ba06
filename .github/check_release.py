"""Tell what keeps a tag from being released: python .github/check_release.py v0.2.0

The placeholder OWNER, a version that is not the tag's, and a changelog that does not know it, or whose "Unreleased"
holds what the release has.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "OWNER"
# Where users follow a link.
_PAGES = ("pyproject.toml", "mkdocs.yml", "CITATION.cff", "README.md", "SECURITY.md", "CONTRIBUTING.md", "docs/*.md")


def problems(tag: str, root: Path = ROOT) -> Iterator[str]:
    """Everything that is wrong, a line each."""
    for path in (path for pattern in _PAGES for path in sorted(root.glob(pattern))):
        if found := [line for line in _text(path).splitlines() if re.search(rf"[/.]*\b{PLACEHOLDER}[/.]", line)]:
            name = path.relative_to(root).as_posix()
            yield f"{name}: replace {PLACEHOLDER} by the account that publishes the project: {found[0].strip()}"
    version = tag.removeprefix("v")
    for name, line in (
        ("spec_stack/__init__.py", f'__version__ = "{version}"'),
        ("CITATION.cff", f"version: {version}"),
    ):
        if line not in _text(root / name).splitlines():
            yield f"{name}: there is no line {line}"
    changes = re.split(r"^## ", _text(root / "CHANGELOG.md"), flags=re.MULTILINE)[1:]
    if not any(re.match(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n", part) for part in changes):
        yield f"CHANGELOG.md: there is no part '## [{version}] - DATE'"
    if any(part.startswith("[Unreleased]") and part.partition("\n")[2].strip() for part in changes):
        yield "CHANGELOG.md: Unreleased is not empty; move what it holds to the version"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python .github/check_release.py TAG")
    found = list(problems(sys.argv[1]))
    print("\n".join(found) or f"{sys.argv[1]} can be released", file=sys.stderr if found else sys.stdout)
    sys.exit(bool(found))
