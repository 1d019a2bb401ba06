# `spec-stack proxy` on a CPU, in front of any OpenAI-compatible server. From the repository's root:
#   docker build -f deploy/proxy.Dockerfile --build-arg TORCH_CPU_INDEX=URL -t spec-stack-proxy .
#   docker run -p 127.0.0.1:8001:8001 -v models:/models spec-stack-proxy \
#     --upstream http://HOST:8000 --draft Qwen/Qwen2.5-Coder-0.5B-Instruct
FROM python:3.11-slim
# An index with PyTorch's CPU builds; without it the image holds gigabytes of CUDA.
ARG TORCH_CPU_INDEX=""
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY spec_stack spec_stack
RUN if [ -n "$TORCH_CPU_INDEX" ]; then \
      pip install --no-cache-dir --no-deps --index-url "$TORCH_CPU_INDEX" "$(grep '^torch==' constraints.txt)"; \
    fi \
    && pip install --no-cache-dir -c constraints.txt '.[serve]' \
    && useradd --create-home serving && mkdir /models && chown serving /models
USER serving
# Drafts named by hub id are stored here.
ENV HF_HOME=/models
VOLUME /models
EXPOSE 8001
HEALTHCHECK --start-period=5m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8001/health', timeout=5)"]
# Whoever reaches the container's port reaches the upstream server: publish it to loopback, or behind nginx.conf.
ENTRYPOINT ["spec-stack", "proxy", "--host", "0.0.0.0", "--port", "8001"]
CMD ["--upstream", "http://vllm:8000", "--draft", "Qwen/Qwen2.5-Coder-0.5B-Instruct"]
