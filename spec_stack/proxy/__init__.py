"""An OpenAI-compatible proxy that prunes prompts before another server (extra `serve`)."""
