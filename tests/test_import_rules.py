"""Who may import whom: the walls of the house (docs/decisions.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spec_stack"
ROOMS = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
# What each room may import of the package beside itself. A file outside the rooms may import any.
ALLOWED = {
    "controller": {"config"},
    "prefill": {"config", "types", "controller.base"},
    "decode": {"config", "types", "clock", "controller.base", "controller.lookup"},
    "offline": {"config", "controller"},
    "hf": {"config", "types", "controller", "decode"},
    "tokenizers": {"types", "prefill", "hf"},
    "serve": {"config", "types", "answering", "hf.prompt"},
    "sglang": {"config", "types", "controller", "prefill", "tokenizers.chat_turns"},
    # They run whole requests, so they see what a user sees, and the parts they show or score with.
    "explain": {"config", "types", "controller.base", "offline.records", "prefill", "decode", "hf", "pair"}
    | {"generator", "request", "caches"},
    "lm_eval": {"config", "decode", "hf.prompt", "generator", "request", "caches"},
}
LIBRARIES = {
    "transformers": {"hf", "tokenizers", "pair.py", "generator.py", "custom_generate.py"},
    "bitsandbytes": {"hf"},
    "xgrammar": {"hf"},
    "flashinfer": {"hf"},
    "peft": {"hf"},
    "fastapi": {"serve"},
    "openai": {"serve"},
    "sglang": {"sglang"},
    "lm_eval": {"lm_eval"},
}
COMPOSERS = {"generator.py", "custom_generate.py", "cli.py", "demo.py", "__init__.py", "observe.py", "harness_model.py"}


def files(*folders: Path) -> list[Path]:
    found = sorted(path for folder in folders for path in folder.rglob("*.py"))
    assert found
    return found


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, with the names it takes from packages; not those for type checkers only."""
    modules = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            module = node.module or ""
            modules |= {
                f"{module}.{alias.name}" if _is_module(f"{module}.{alias.name}") else module for alias in node.names
            }
    return modules


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def internal(path: Path) -> set[str]:
    """The same, of the package, without its name."""
    return {name.removeprefix("spec_stack.") for name in imports(path) if name.startswith("spec_stack.")}


def home(path: Path) -> str:
    """The room of a file of the package, or the file itself where it stands in none."""
    return path.relative_to(PACKAGE).parts[0]


def test_every_room_has_a_rule() -> None:
    assert set(ALLOWED) == ROOMS


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_its_walls_allow(room: str) -> None:
    doors = {room, *ALLOWED[room]}
    for path in files(PACKAGE / room):
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


def test_config_imports_nothing_of_the_package() -> None:
    assert not internal(PACKAGE / "config.py")


def test_only_composers_import_the_generator() -> None:
    for path in files(PACKAGE):
        if path.name not in COMPOSERS:
            assert "generator" not in internal(path), path.relative_to(ROOT)


def test_nothing_imports_the_experiments_and_they_import_no_tests() -> None:
    for path in files(PACKAGE):
        assert not any(name.startswith(("experiments", "tests")) for name in imports(path)), path
    for path in files(ROOT / "experiments"):
        assert not any(name.startswith("tests") for name in imports(path)), path


def test_the_oracles_import_nothing_of_the_package() -> None:
    for path in (ROOT / "tests" / "support").glob("reference*.py"):
        assert not internal(path), path


def test_no_room_holds_more_than_a_quarter_of_the_library() -> None:
    num_lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files(PACKAGE)}
    for room in ROOMS:
        share = sum(lines for path, lines in num_lines.items() if home(path) == room) / sum(num_lines.values())
        assert share <= 0.25, f"{room} holds {share:.0%}"


def test_nothing_edits_the_import_path() -> None:
    for path in files(ROOT / "spec_stack", ROOT / "tests", ROOT / "experiments"):
        if path != Path(__file__):
            assert "sys.path" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("module", ["controller.registry", "offline.replay", "offline.records"])
def test_policies_and_their_evaluation_load_no_torch(module: str) -> None:
    code = f"import spec_stack.{module}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
