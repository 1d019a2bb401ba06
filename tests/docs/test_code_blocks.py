"""What the pages show runs, prints what they say, and names only what is there."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import inspect
import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from spec_stack import SpecStackGenerator
from spec_stack.cli.arguments import build_parser
from spec_stack.controller.registry import POLICIES
from spec_stack.hf.architectures import SUPPORTED
from spec_stack.prefill.registry import SCORERS
from spec_stack.sglang.server_args import ServerConfig, add_flags
from tests.support.pages import PAGES, ROOT, Block, blocks, name_of, python_blocks
from tests.support.tiny_architectures import CONFIGS

# Pages that prefill thousands of tokens densely, for comparison, and one that records runs.
_SLOW = {"README.md", "docs/quickstart.md", "docs/add-a-policy.md"}
_NIGHTLY = {"docs/add-a-policy.md"}
_RUN = [page for page in PAGES if any(block.is_run for block in python_blocks(page))]
_PATH = re.compile(r"(?<![\w./-])(?:experiments|tests|spec_stack|examples|docs)/[\w./-]*\w")
_MODULE = re.compile(r"-m ((?:experiments|tests)[\w.]*\w)")
# Files that a reader makes by following a page.
_MADE = {"spec_stack/controller/patience.py", "spec_stack/prefill/rules/rare_words.py"}


@pytest.fixture
def tables() -> Iterator[None]:
    """The tables that a page may enter something into, put back afterwards."""
    saved = [(table, dict(table)) for table in (SUPPORTED, CONFIGS, POLICIES, SCORERS)]
    yield
    for table, entries in saved:
        table.clear()
        table.update(entries)


def _marked(page: Path) -> Any:
    name = name_of(page)
    slow, nightly = [pytest.mark.slow] if name in _SLOW else [], [pytest.mark.nightly] if name in _NIGHTLY else []
    return pytest.param(page, id=name, marks=[*slow, *nightly])


@pytest.mark.parametrize("page", [_marked(page) for page in _RUN])
def test_every_python_block_runs_and_prints_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: None
) -> None:
    monkeypatch.chdir(tmp_path)
    # A module of its own, where dataclasses look for the names of their annotations.
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for block in python_blocks(page):
        if block.is_run:
            output = _run(block, page, vars(module))
            if block.output is not None:
                assert output.split("\n") == block.output.split("\n"), f"{name_of(page)}, line {block.line}"


def _run(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    # Blank lines in front, so that a traceback names the line of the page.
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, namespace)
    return output.getvalue()


def _calls() -> list[tuple[str, ast.Call]]:
    """Every call of a method in a Python block, run or not, but those that a page makes to show how they fail."""
    found = []
    for page in PAGES:
        for block in python_blocks(page):
            tree = ast.parse(block.code)
            failing = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and id(node) not in failing:
                    found.append((f"{name_of(page)}:{block.line + node.lineno - 1}", node))
    return found


def test_every_option_in_a_python_block_is_one() -> None:
    checked = 0
    for where, call in _calls():
        assert isinstance(call.func, ast.Attribute)
        owner, name = ast.unparse(call.func.value), call.func.attr
        if owner in ("generator", "SpecStackGenerator") and name in ("generate", "stream", "from_pretrained"):
            options = inspect.signature(getattr(SpecStackGenerator, name)).parameters
            unknown = {keyword.arg for keyword in call.keywords} - set(options)
            assert not unknown, f"{where}: {name} takes no {unknown}"
            checked += 1
    assert checked > 8


def test_every_command_line_in_a_shell_block_is_one() -> None:
    checked = 0
    for page in PAGES:
        for block in blocks(page):
            for line in block.code.split("\n") if block.language == "bash" else ():
                command = line.split("|")[-1].strip()
                if command.startswith("spec-stack ") and "…" not in command:
                    _parse(shlex.split(command, comments=True)[1:])
                    checked += 1
    assert checked > 4


def _parse(arguments: list[str]) -> None:
    # --version and --help end the program, and well.
    ends = pytest.raises(SystemExit, match="0") if arguments[0] in ("--version", "--help") else contextlib.nullcontext()
    with ends:
        build_parser().parse_args(arguments)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_path_and_module_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [path for path in _PATH.findall(text) if not (ROOT / path).exists() and path not in _MADE]
    missing += [module for module in _MODULE.findall(text) if importlib.util.find_spec(module) is None]
    assert not missing


def test_every_server_flag_that_a_page_names_is_one() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    named = {flag for page in PAGES for flag in re.findall(r"--spec-stack-[\w-]+", page.read_text(encoding="utf-8"))}
    assert len(named) > 4
    assert named <= known


def test_the_server_page_has_the_servers_defaults_and_a_file_that_it_takes() -> None:
    page = ROOT / "docs" / "serving.md"
    rows = dict(re.findall(r"^\| `--spec-stack-([\w-]+)` \|(.*?)\|", page.read_text(encoding="utf-8"), flags=re.M))
    defaults = ServerConfig()
    shown = {
        "min-prompt-tokens": str(defaults.prefill.min_prompt_tokens),
        "keep-rate": str(defaults.prefill.keep_rate),
        "sparse-prefill": defaults.prefill.sparse_prefill,
        "max-dropped-attention": "",
        "draft-kv-budget": str(defaults.prefill.draft_kv_budget),
        "scoring-model": "",
        "policy": defaults.policy,
        "gammas": " ".join(map(str, defaults.gammas)),
        "calibration": "",
        "follow-up": defaults.follow_up,
        "draft-pool-tokens": "",
        "audit-rate": f"{defaults.audit_rate:g}",
        "audit-max-loss": "",
        "config": "",
    }
    assert {name: default.strip() for name, default in rows.items()} == shown
    (file,) = [block.code for block in blocks(page) if block.language == "json"]
    settings = ServerConfig.from_mapping(json.loads(file))
    assert (settings.prefill.prefill_chunk, settings.gammas) == (2048, (0, 2, 4, 8))


def test_the_pages_are_short() -> None:
    words = {name_of(page): len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert words["README.md"] <= 700
    assert words["docs/decisions.md"] <= 2_000
    assert sum(number for name, number in words.items() if name.startswith("docs/")) <= 15_000
