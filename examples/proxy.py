"""`spec-stack proxy` before `spec-stack serve`, and an unmodified OpenAI client. Runs offline (pip install openai)."""

import threading
import time

import uvicorn
from openai import OpenAI

from spec_stack import Pruner, SpecStackGenerator
from spec_stack.proxy.app import build_app
from spec_stack.proxy.config import ProxyConfig
from spec_stack.serve.app import build_app as build_endpoint


def start(app: object) -> tuple[uvicorn.Server, str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    threading.Thread(target=server.run).start()
    while not server.started:
        time.sleep(0.01)
    return server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def main() -> None:
    upstream, upstream_url = start(build_endpoint(SpecStackGenerator.from_pretrained()))
    proxy, url = start(build_app(Pruner.from_pretrained(), ProxyConfig(upstream_url, deadline_s=60)))
    client = OpenAI(base_url=f"{url}/v1", api_key="anything")
    rooms = "".join(f"The code of room {at} is {4 * at}.\n" for at in range(300))
    chat = [{"role": "user", "content": f"{rooms}Bruno lives in Vienna. Where does Bruno live?"}]
    ask = client.chat.completions.with_raw_response.create
    raw = ask(model="spec-stack", messages=chat, max_tokens=16, temperature=0)
    print(raw.headers["x-spec-stack-prompt-tokens"], "tokens,", raw.headers["x-spec-stack-kept-tokens"], "kept")
    print(raw.parse().choices[0].message.content)
    proxy.should_exit = upstream.should_exit = True


if __name__ == "__main__":
    main()
