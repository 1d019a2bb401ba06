"""`--config`: a TOML file of a server's flags, which given flags override."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_stack.cli.arguments import build_parser, config_of
from spec_stack.cli.main import main
from spec_stack.config import PrefillConfig
from spec_stack.proxy.config import ProxyConfig
from spec_stack.serve.config import ServeConfig

PROXY = """
upstream = "http://127.0.0.1:8000"
draft = "somewhere/draft"
port = 9001
recall = false
log_json = true
keep-rate = 0.1
check-rates = [0.3, 0.5]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.toml"


def test_a_file_says_what_flags_say(file: Path) -> None:
    file.write_text(PROXY, encoding="utf-8")
    read = build_parser().parse_args(["proxy", "--config", str(file)])
    flags = ["--upstream", "http://127.0.0.1:8000", "--port", "9001", "--no-recall", "--log-json"]
    flags += ["--keep-rate", "0.1", "--check-rates", "0.3", "0.5", "--draft", "somewhere/draft"]
    told = build_parser().parse_args(["proxy", *flags])
    assert config_of(ProxyConfig, read) == config_of(ProxyConfig, told)
    assert (
        config_of(PrefillConfig, read)
        == config_of(PrefillConfig, told)
        == PrefillConfig(keep_rate=0.1, check_rates=(0.3, 0.5))
    )
    assert read.draft == "somewhere/draft"


def test_given_flags_override_the_file(file: Path) -> None:
    file.write_text(PROXY, encoding="utf-8")
    given = ["--port=1234", "--recall", "--keep-rate", "0.4"]
    for arguments in (["--config", str(file), *given], [*given, f"--config={file}"]):
        read = build_parser().parse_args(["proxy", *arguments])
        assert (read.port, read.recall, read.keep_rate) == (1234, True, 0.4)


def test_one_key_twice_is_refused_and_a_byte_order_mark_is_none(file: Path) -> None:
    file.write_text("\ufeff" + PROXY, encoding="utf-8")
    assert build_parser().parse_args(["proxy", "--config", str(file)]).port == 9001
    file.write_text(PROXY + "keep_rate = 0.2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="keep-rate and keep_rate are one key"):
        build_parser().parse_args(["proxy", "--config", str(file)])


def test_a_list_of_the_file_is_replaced_and_not_extended(file: Path) -> None:
    file.write_text('api-key = ["one", "two"]\ncors_origin = "*"\nlog-level = "warning"\nmax-time = 30\n')
    read = build_parser().parse_args(["serve", "--config", str(file)])
    assert read.api_keys == ["one", "two"]
    config = config_of(ServeConfig, read)
    assert (config.cors_origins, config.log_level, config.max_time) == (("*",), "warning", 30)
    assert build_parser().parse_args(["serve", "--config", str(file), "--api-key", "mine"]).api_keys == ["mine"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("keeprate = 0.1", "unknown key 'keeprate'; did you mean keep-rate?"),
        ("zzz = 1", "unknown key 'zzz'; its keys are the command's flags"),
        ('config = "other.toml"', "unknown key 'config'"),
        ("[server]\nport = 1", "unknown key 'server'"),
        ("port = [1, 2]", "port must be one value, got [1, 2]"),
        ("port = true", "port must be a value, got True"),
        ("port = {a = 1}", "port must be one value"),
        ("recall = 1", "recall must be true or false, got 1"),
        ("check-rates = [[0.1]]", "check-rates must be a list of values"),
        ("port 1", "is not TOML: "),
        (b"\xff\xfe", "is not TOML: "),
        (None, "No such file"),
        ("upstream = 'http://127.0.0.1:8000'\nlog-json = true\nport = 99999", "port must be a whole number"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_by_name(
    file: Path, text: str | bytes | None, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["proxy", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert said.count("\n") == 1
