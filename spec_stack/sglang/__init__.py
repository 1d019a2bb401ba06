"""SGLang: sparse prefill and adaptive drafting behind one launch flag, `--speculative-algorithm SPEC_STACK`.

SGLang finds `plugin.register` through the entry-point group `sglang.srt.plugins`. Nothing here is imported by the rest
of the package, and nothing happens in a server that runs another algorithm.
"""
