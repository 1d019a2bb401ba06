"""An agent by OpenAI's own client over the endpoint: are its tool calls parsed, whole and streamed?

One conversation of five questions, each of which needs a tool: the model is sent the tools, its calls are run and
their results sent back, until it answers in text. Every call has to come as `tool_calls` with arguments that are a JSON
object for a tool that exists; text that still looks like a call counts as one that was not parsed. The loop is what
any OpenAI client does; nothing in it knows this server. `--choice required` forces a question's first call.

python -m experiments.serving.agent_loop --target FOLDER --draft FOLDER
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, process_time, sleep
from typing import Any

import uvicorn
from openai import OpenAI

from experiments.common.environment import describe
from experiments.common.report import add_out_argument, print_report
from spec_stack import SpecStackGenerator
from spec_stack.serve.app import build_app
from spec_stack.serve.config import ServeConfig

SYSTEM = (
    "You are an assistant of a small company. Look every fact up with a tool, once, and then answer from its result in "
    "one short sentence."
)
QUESTIONS = (
    "Which department does Alice work in?",
    "And what does the weather look like in Vienna?",
    "What is 417 times 23?",
    "How many chairs are in stock?",
    "Which department does Bruno work in?",
)
MOST_CALLS = 3


def _tool(name: str, description: str, /, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": [*properties],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("get_department", "The department that an employee works in", name="string"),
    _tool("get_weather", "The weather in a city now", city="string"),
    _tool("multiply", "The product of two integers", a="integer", b="integer"),
    _tool("get_stock", "How many pieces of an item are in stock", item="string"),
]
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "get_department": lambda name: {"alice": "Research", "bruno": "Sales"}.get(str(name).lower(), "unknown"),
    "get_weather": lambda city: {"city": city, "celsius": 7, "sky": "rain"},
    "multiply": lambda a, b: int(a) * int(b),
    "get_stock": lambda item: {"item": item, "pieces": 36},
}


@dataclass
class Outcome:
    """The outcome of a conversation.

    num_turns: questions in which a tool was called. num_calls: calls that came parsed. num_unparsed: answers in text
    that look like a call. cached, new: prompt tokens that the server had, and had not, one entry per request.
    """

    streams: bool
    num_questions: int = 0
    num_turns: int = 0
    num_calls: int = 0
    num_unparsed: int = 0
    cached: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0


def ask(client: OpenAI, messages: list[Any], choice: str, streams: bool, outcome: Outcome) -> dict[str, Any]:
    """One request; the assistant's message as a client keeps it."""
    request: dict[str, Any] = {"model": "spec-stack", "messages": messages, "tools": TOOLS, "tool_choice": choice}
    request |= {"temperature": 0, "max_tokens": 96}
    if streams:
        message, usage = _joined(client, request)
    else:
        answer = client.chat.completions.create(**request)
        message, usage = answer.choices[0].message.model_dump(exclude_none=True), answer.usage
    outcome.cached.append(usage.prompt_tokens_details.cached_tokens)
    outcome.new.append(usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens)
    return message


def _joined(client: OpenAI, request: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """A stream's deltas put together."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for delta in choice.delta.tool_calls or []:
                call = calls.setdefault(
                    delta.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] += delta.id or ""
                call["function"]["name"] += delta.function.name or ""
                call["function"]["arguments"] += delta.function.arguments or ""
    return message | ({"tool_calls": [calls[index] for index in sorted(calls)]} if calls else {}), usage


def converse(client: OpenAI, streams: bool, first_choice: str) -> Outcome:
    """The five questions, one conversation."""
    outcome = Outcome(streams)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    wall_s, cpu_s = monotonic(), process_time()
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        outcome.num_questions += 1
        choice, called = first_choice, False
        for _ in range(MOST_CALLS + 1):
            message = ask(client, messages, choice, streams, outcome)
            messages.append(message)
            content = message.get("content") or ""
            outcome.num_unparsed += any(mark in content for mark in ("<tool_call>", '"arguments"', "<tools>"))
            if not message.get("tool_calls"):
                break
            called, choice = True, "auto"
            for call in message["tool_calls"]:
                outcome.num_calls += 1
                print(f"  {question} -> {call['function']}", flush=True)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(_result(call))})
        outcome.num_turns += called
        outcome.answers.append(content)
        print(f"  {question} -> {content!r}", flush=True)
    outcome.wall_s, outcome.cpu_s = round(monotonic() - wall_s, 1), round(process_time() - cpu_s, 1)
    return outcome


def _result(call: dict[str, Any]) -> Any:
    """Call a tool; raises for arguments that are no JSON object, and tells the model of a wrong call."""
    arguments = json.loads(call["function"]["arguments"])
    try:
        return FUNCTIONS[call["function"]["name"]](**arguments)
    except (KeyError, TypeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="a model whose chat template calls tools")
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--choice", default="auto", choices=["auto", "required"], help="for a question's first request")
    parser.add_argument("--only", choices=["whole", "streamed"], help="one of the two runs")
    add_out_argument(parser)
    arguments = parser.parse_args()
    generator = SpecStackGenerator.from_pretrained(
        arguments.target, arguments.draft, precision=arguments.precision, calibration=False
    )
    server = uvicorn.Server(
        uvicorn.Config(build_app(generator, ServeConfig(temperature=0)), port=0, log_level="warning")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    outcomes = []
    for name, streams in (("whole", False), ("streamed", True)):
        if arguments.only in (None, name):
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=name, max_retries=0, timeout=900)
            outcome = converse(client, streams, arguments.choice)
            outcomes.append(outcome)
            print(
                f"{name}: calls in {outcome.num_turns} of {outcome.num_questions} questions, {outcome.num_calls} "
                f"of them parsed, {outcome.num_unparsed} not; {outcome.cpu_s} CPU s, {outcome.wall_s} s",
                flush=True,
            )
    server.should_exit = True
    thread.join()
    runs = [asdict(outcome) for outcome in outcomes]
    print_report({"experiment": "agent_loop", **describe(), "choice": arguments.choice, "runs": runs}, arguments.out)


if __name__ == "__main__":
    main()
