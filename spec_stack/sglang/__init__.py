"""SGLang plugin: sparse prefill and adaptive drafting, launched by `--speculative-algorithm SPEC_STACK`.

Loaded through the entry-point group `sglang.srt.plugins`; servers with another algorithm are not changed.
"""
