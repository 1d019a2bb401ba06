# SGLang with the plugin, which its entry point announces. From the repository's root:
#   docker build -f deploy/sglang.Dockerfile -t spec-stack-sglang .
#   docker run --gpus all --ipc host -p 127.0.0.1:30000:30000 -v models:/root/.cache/huggingface spec-stack-sglang
FROM lmsysorg/sglang:v0.5.23
COPY pyproject.toml README.md LICENSE /opt/spec_stack/
COPY spec_stack /opt/spec_stack/spec_stack
# The image has SGLang's own versions of torch and transformers, which stay.
RUN pip install --no-cache-dir --no-deps /opt/spec_stack && spec-stack --help > /dev/null
EXPOSE 30000
ENTRYPOINT ["python3", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000"]
CMD ["--model-path", "Qwen/Qwen2.5-Coder-1.5B-Instruct", \
     "--speculative-algorithm", "SPEC_STACK", \
     "--speculative-draft-model-path", "Qwen/Qwen2.5-Coder-0.5B-Instruct", \
     "--enable-metrics"]
