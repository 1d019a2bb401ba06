"""The endpoint of `spec-stack serve` in this process, and OpenAI's client as its guest. Runs offline.

pip install openai; python examples/openai_server.py
"""

import threading
import time

import uvicorn
from openai import OpenAI

from spec_stack import SpecStackGenerator
from spec_stack.serve.app import build_app


def main() -> None:
    app = build_app(SpecStackGenerator.from_pretrained())
    # Port 0 is any that is free. Alone in a process: spec_stack.serve.app.serve(generator, ServeConfig(port=8000)).
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="anything")
    messages = [{"role": "user", "content": "Bruno lives in Vienna. Where does Bruno live?"}]
    for chunk in client.chat.completions.create(
        model="spec-stack", messages=messages, max_tokens=32, temperature=0, stream=True
    ):
        print(chunk.choices[0].delta.content, end="", flush=True)
    print(f"\nstopped because of: {chunk.choices[0].finish_reason}")
    server.should_exit = True
    thread.join()


if __name__ == "__main__":
    main()
