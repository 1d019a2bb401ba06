"""Who may import whom, and how large a file may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spec_stack"
BACKEND_LIBRARIES = {"transformers", "bitsandbytes", "flashinfer", "sglang"}
COMPOSERS = {"generator.py", "cli.py", "demo.py", "__init__.py"}


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            modules.add(node.module or "")
    return modules


def package_files(folder: str) -> list[Path]:
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files
    return files


def internal(path: Path) -> set[str]:
    return {name for name in imported_modules(path) if name.split(".")[0] == "spec_stack"}


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("controller", ("spec_stack.records", "spec_stack.config", "spec_stack.controller")),
        ("prefill", ("spec_stack.records", "spec_stack.config", "spec_stack.types", "spec_stack.prefill")),
        ("decode", ("spec_stack.records", "spec_stack.config", "spec_stack.types", "spec_stack.decode")),
    ],
)
def test_a_phase_imports_only_what_its_wall_allows(folder: str, allowed: tuple[str, ...]) -> None:
    for path in package_files(folder):
        for name in internal(path):
            assert name.startswith(allowed), f"{path.relative_to(ROOT)} imports {name}"


def test_only_backends_and_the_composer_import_model_libraries() -> None:
    for path in PACKAGE.rglob("*.py"):
        if "backends" in path.parts or path.name == "generator.py":
            continue
        heads = {name.split(".")[0] for name in imported_modules(path)}
        assert not heads & BACKEND_LIBRARIES, f"{path.relative_to(ROOT)} imports {heads & BACKEND_LIBRARIES}"


def test_records_and_config_import_nothing_of_the_package() -> None:
    assert not internal(PACKAGE / "records.py")
    assert not internal(PACKAGE / "config.py")


def test_only_composers_import_the_generator() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name not in COMPOSERS:
            assert "spec_stack.generator" not in imported_modules(path), path.relative_to(ROOT)


def test_nothing_imports_experiments_and_the_reference_imports_nothing_of_the_package() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not any(name.startswith("experiments") for name in imported_modules(path))
    assert not internal(ROOT / "tests" / "reference.py")


def test_importing_the_controller_loads_no_torch() -> None:
    code = (
        "import spec_stack.controller.policies, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_files_stay_under_four_hundred_lines() -> None:
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]:
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        assert num_lines <= 400, f"{path.relative_to(ROOT)} has {num_lines} lines"
