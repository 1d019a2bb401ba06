"""What deploy/ and SECURITY.md name is what the package has: flags, ports, limits, versions and files."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import tomllib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import yaml

from spec_stack.cli.arguments import build_parser, config_of
from spec_stack.proxy.config import ProxyConfig
from spec_stack.serve.config import ServeConfig
from tests.support.pages import ROOT

DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def instructions(name: str) -> dict[str, list[str]]:
    """A Dockerfile's instructions by name."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        word, _, rest = line.partition(" ")
        found.setdefault(word, []).append(rest.strip())
    return found


def proxy_of(command: Sequence[str]) -> tuple[Namespace, ProxyConfig]:
    """A command as `spec-stack` reads it, which exits at unknown flags."""
    assert command[0].rpartition("/")[2] == "spec-stack"
    arguments = build_parser().parse_args(command[1:])
    return arguments, config_of(ProxyConfig, arguments)


def serving_pin(package: str) -> str:
    pins = (ROOT / "tests" / "serving" / "requirements.txt").read_text(encoding="utf-8")
    return re.search(rf"^{package}==(.+)$", pins, re.MULTILINE)[1]  # type: ignore[index]


def test_dockerfiles_copy_what_there_is_and_know_their_instructions() -> None:
    known = {
        *("FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "ENV"),
        *("VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"),
    }
    for name in ("proxy.Dockerfile", "sglang.Dockerfile"):
        found = instructions(name)
        assert found.keys() <= known
        sources = [word for line in found["COPY"] for word in line.split()[:-1]]
        assert all((ROOT / source).exists() for source in sources)
        # What the wheel is built from is there.
        assert {"pyproject.toml", PROJECT["readme"], "LICENSE", "spec_stack"} <= set(sources)


def test_images_are_of_the_versions_that_are_tested() -> None:
    (python,) = re.findall(r"^python:(\d+)\.(\d+)-slim$", instructions("proxy.Dockerfile")["FROM"][0])
    least = PROJECT["requires-python"].removeprefix(">=").split(".")
    assert tuple(map(int, python)) >= tuple(map(int, least))
    assert instructions("sglang.Dockerfile")["FROM"] == [f"lmsysorg/sglang:v{serving_pin('sglang')}"]
    extra = re.search(r"'\.\[(\w+)\]'", instructions("proxy.Dockerfile")["RUN"][0])[1]  # type: ignore[index]
    assert extra in PROJECT["optional-dependencies"]
    image, version = COMPOSE["vllm"]["image"].split(":v")
    assert image == "vllm/vllm-openai"
    assert f"vLLM {version} " in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def test_every_proxy_command_is_one_and_listens_where_its_port_is_published() -> None:
    found = instructions("proxy.Dockerfile")
    entry = json.loads(found["ENTRYPOINT"][0])
    commands = [entry + json.loads(found["CMD"][0]), entry + COMPOSE["proxy"]["command"]]
    for arguments, config in map(proxy_of, commands):
        assert (arguments.command, config.host) == ("proxy", "0.0.0.0")
        assert config.upstream == "http://vllm:8000"
        assert found["EXPOSE"] == [str(config.port)]
        assert f"127.0.0.1:{config.port}/health" in found["HEALTHCHECK"][0]
        assert COMPOSE["proxy"]["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
    assert "ports" not in COMPOSE["vllm"]
    # What it writes lies on a volume or in memory: the rest is read-only.
    assert found["VOLUME"] == ["/models"]
    assert COMPOSE["proxy"]["volumes"] == ["drafts:/models"]
    assert (DEPLOY / COMPOSE["proxy"]["build"]["context"] / COMPOSE["proxy"]["build"]["dockerfile"]).is_file()


def test_the_sglang_image_is_launched_as_the_readme_launches_it() -> None:
    found = instructions("sglang.Dockerfile")
    command = json.loads(found["ENTRYPOINT"][0]) + json.loads(found["CMD"][0])
    shown = re.search(r"python -m (sglang\.launch_server [^`]+?)```", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown is not None
    assert set(shlex.split(shown[1].replace("\\\n", " "))) <= set(command)
    assert found["EXPOSE"] == [command[command.index("--port") + 1]]


def test_the_unit_is_a_proxy_on_loopback_that_may_finish_its_requests() -> None:
    unit: Any = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / "spec-stack-proxy.service")
    assert unit.sections() == ["Unit", "Service", "Install"]
    arguments, config = proxy_of(shlex.split(unit["Service"]["ExecStart"]))
    assert (arguments.command, config.host) == ("proxy", ProxyConfig.host)
    assert float(unit["Service"]["TimeoutStopSec"]) > config.shutdown_s
    # The draft's folder is the one place that the unit may write to.
    assert f"HF_HOME=/var/lib/{unit['Service']['StateDirectory']}" in unit["Service"]["Environment"].split()


def test_nginx_has_the_proxys_limits_and_shows_nothing_but_the_api() -> None:
    text = re.sub(r"#.*", "", (DEPLOY / "nginx.conf").read_text(encoding="utf-8"))
    assert text.count("{") == text.count("}")
    assert all(line.strip()[-1] in "{};" for line in text.splitlines() if line.strip())
    directives = dict(re.findall(r"^\s*(\w+)\s+([^;{]+);", text, re.MULTILINE))
    assert int(directives["client_max_body_size"].removesuffix("m")) << 20 == ProxyConfig.max_body_bytes
    assert float(directives["proxy_read_timeout"].removesuffix("s")) == ProxyConfig.timeout_s
    assert directives["proxy_pass"] == f"http://{ProxyConfig.host}:{ProxyConfig.port}"
    assert directives["proxy_buffering"] == "off"
    assert re.findall(r"location (\S+) \{", text) == ["/v1/", "/"]
    assert re.search(r"location / \{\s*return 404;", text)


def test_the_security_page_names_addresses_flags_and_files_that_there_are() -> None:
    for config in (ServeConfig, ProxyConfig):
        assert f"{config.host}:{config.port}" in SECURITY
    fields = {f"--{name.replace('_', '-')}" for config in (ServeConfig, ProxyConfig) for name in vars(config)}
    named = set(re.findall(r"--[a-z][a-z-]+", SECURITY))
    assert {"--upstream", "--max-parsed-bytes", "--strip-special-tokens"} <= named
    assert named - fields == {"--api-key", "--measure", "--prompts"}
    assert build_parser().parse_args(["serve", "--api-key", "x"]).api_keys == ["x"]
    assert build_parser().parse_args(["doctor", "--measure", "--prompts", "x"]).measure
    for path in re.findall(r"`((?:tests|deploy)/[\w/.]+)`", SECURITY):
        assert (ROOT / path).is_file(), path
