"""Who may import whom: the walls of the house (docs/decisions.md)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spec_stack"
ROOMS = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
# What each room may import of the package beside itself.
ALLOWED = {
    "settings": "",
    "controller": "config settings",
    "prefill": "config devices settings types controller.base",
    "decode": "config settings types controller.base controller.ngram",
    "hf": "config devices settings.warning types controller decode prefill.prompt_text prefill.alignment",
    "tokenizers": "types prefill hf",
    "engine": "config settings types controller decode prefill hf tokenizers",
    "api": "calibrate config types settings controller decode.ngram_index records prefill hf engine",
    "calibrate": "binomial config settings types decode prefill hf tokenizers.prompt_reader engine",
    # What serve and the proxy share, with audits for SGLang.
    "http": "binomial config settings",
    "serve": "config settings types hf.prompt hf.structured hf.answer_parser http api",
    "proxy": "config settings api.pruner api.request_body http",
    "sglang": "config devices settings types controller prefill tokenizers hf.loading hf.prompt http.audits "
    "http.config",
    # They run whole requests, so they see what a user sees, and the parts they show or score with.
    "bench": "config types records controller prefill hf engine api calibrate",
    "explain": "config types controller.base records prefill decode hf engine api",
    "cli": "config devices settings types controller decode records prefill hf tokenizers engine api bench calibrate "
    "http serve proxy explain sglang",
    # Loose files.
    "config": "settings",
    "binomial": "",
    "devices": "",
    "types": "config controller.base prefill.explanation",
    "records": "controller.base",
    # The first two are loaded at once (they hold names alone), the others where they are asked for.
    "__init__": "controller.registry prefill.registry config controller.base types api bench.fidelity",
    "__main__": "cli",
}
LIBRARIES = {
    "transformers": {"hf", "tokenizers", "engine", "api", "bench"},
    "bitsandbytes": {"hf"},
    "llguidance": {"hf"},
    "peft": {"hf"},
    "fastapi": {"http", "serve", "proxy"},
    "httpcore2": {"proxy"},
    "httpx2": {"proxy"},
    "sglang": {"sglang"},
}
MAX_ROOM = 0.25
MAX_LOOSE = 0.05
# Private names of other libraries that tests read for want of public ones, and the methods of a named tuple.
FOREIGN = {
    *(
        "_actions",
        "_SubParsersAction",
        "_dynamo",
        "_attn_implementation_internal",
        "_prefill_decode_interval_remaining",
    ),
    *("_replace", "_asdict", "_fields"),
}
_PLACE = re.compile(r"spec_stack(\.\w+)+")


def files(*folders: Path) -> list[Path]:
    found = sorted(path for folder in folders for path in folder.rglob("*.py"))
    assert found
    return found


@cache
def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, with the names it takes from packages: for type checkers only, and as
    strings ("spec_stack.decode.proposer:Proposer"), too."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            module = node.module or ""
            modules |= {
                f"{module}.{alias.name}" if _is_module(f"{module}.{alias.name}") else module for alias in node.names
            }
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            place = node.value.partition(":")[0]
            if _PLACE.fullmatch(place) and _is_module(place):
                modules.add(place)
    return modules


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def internal(path: Path) -> set[str]:
    """The same, of the package, without its name."""
    found = {name.removeprefix("spec_stack.") for name in imports(path) if name.startswith("spec_stack.")}
    if path == PACKAGE / "__init__.py":
        # The table of what is loaded on first use.
        assigned = (node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign))
        found |= {*next(ast.literal_eval(node.value) for node in assigned if ast.unparse(node.targets[0]) == "_HOMES")}
    return found


def home(path: Path) -> str:
    """The room of a file of the package, or the file itself where it stands in none."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_every_room_and_every_loose_file_has_a_rule() -> None:
    assert set(ALLOWED) == ROOMS | {path.stem for path in PACKAGE.glob("*.py")}


@pytest.mark.parametrize("place", sorted(ALLOWED))
def test_a_place_imports_only_what_its_walls_allow(place: str) -> None:
    doors = {place, *ALLOWED[place].split()}
    for path in files(PACKAGE):
        if home(path) == place:
            for name in internal(path):
                fits = any(name == door or name.startswith(f"{door}.") for door in doors)
                assert fits, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_only_its_own_rooms_import_a_model_library(library: str) -> None:
    for path in files(PACKAGE):
        if home(path) not in LIBRARIES[library]:
            assert library not in {name.split(".")[0] for name in imports(path)}, path.relative_to(ROOT)


def test_no_module_imports_itself_over_others() -> None:
    graph = {}
    for path in files(PACKAGE):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = internal(path) - {name}
    TopologicalSorter(graph).prepare()


def test_nothing_imports_the_experiments_and_they_import_no_tests() -> None:
    for path in files(PACKAGE):
        assert not any(name.startswith(("experiments", "tests")) for name in imports(path)), path
    for path in files(ROOT / "experiments"):
        assert not any(name.startswith("tests") for name in imports(path)), path


def test_the_oracles_import_nothing_of_the_package() -> None:
    for path in (ROOT / "tests" / "support").glob("reference*.py"):
        assert not internal(path), path


def test_no_room_holds_more_than_a_quarter_of_the_library_and_little_lies_loose() -> None:
    num_lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files(PACKAGE)}
    shares = dict.fromkeys(ROOMS, 0.0)
    for path, lines in num_lines.items():
        place = "loose" if path.parent == PACKAGE else home(path)
        shares[place] = shares.get(place, 0.0) + lines / sum(num_lines.values())
    assert shares.pop("loose") <= MAX_LOOSE
    assert max(shares.values()) <= MAX_ROOM, shares


def _private_reads(code: str) -> set[str]:
    """Private attributes that are read of anything but the reading object, and private names from the package."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spec_stack"):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("_") and not name.startswith("__")} - FOREIGN


def test_a_private_read_is_found() -> None:
    assert _private_reads("pair.draft._cache.layers\nfrom spec_stack.hf.attention import _fold") == {"_cache", "_fold"}
    assert not _private_reads("self._last, pair.__class__, token._replace(), pair.draft")


def test_tests_read_nothing_private() -> None:
    for path in files(ROOT / "tests"):
        name = path.relative_to(ROOT).as_posix()
        if "support" not in path.parts:
            private = _private_reads(path.read_text(encoding="utf-8"))
            assert not private, f"{name} reads {sorted(private)}"


def test_nothing_edits_the_import_path() -> None:
    for path in files(ROOT / "spec_stack", ROOT / "tests", ROOT / "experiments"):
        if path != Path(__file__):
            assert "sys.path" not in path.read_text(encoding="utf-8"), path


# One import loads them all; the registry by itself is held to less in tests/controller/test_policies.py.
NO_TORCH = "controller.throughput controller.speckv controller.batch bench.replay bench.training records"


def test_policies_replay_and_records_load_no_torch_and_no_scikit_learn() -> None:
    modules = ", ".join(f"spec_stack.{name}" for name in NO_TORCH.split())
    code = (
        f"import {modules}, sys; sys.exit(bool({{'torch', 'transformers', 'sklearn', 'pyarrow'}} & {{*sys.modules}}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
