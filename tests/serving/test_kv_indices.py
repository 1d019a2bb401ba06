"""The index arrays of a draft over its own slots: SGLang's own kernel, in Triton's interpreter."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

_PROGRAM = """
import types, torch
from sglang.srt.layers.attention.triton_backend import TritonMultiStepDraftBackend
from sglang.srt.layers.attention.flashinfer_backend import FlashInferMultiStepDraftBackend
from sglang.srt.layers.attention import flashinfer_backend
from spec_stack.sglang.draft_kv_slots import protect_kv_lengths

STEPS, LENGTHS = 4, [6, 8, 10]
table = torch.arange(3 * 64, dtype=torch.int32).view(3, 64)
kernel = sys.modules[TritonMultiStepDraftBackend.__module__].generate_draft_decode_kv_indices

def indices(backend_class, positions, protected):
    backend = types.SimpleNamespace(
        topk=1, speculative_num_steps=STEPS, max_context_len=64, pool_len=64, page_size=1,
        draft_window_size=0, draft_sink_size=0, generate_draft_decode_kv_indices=kernel,
        req_to_token_pool=types.SimpleNamespace(req_to_token=table),
        kv_indptr=torch.zeros(STEPS, 4, dtype=torch.int32),
        # From 0.5.22 on the rows come through a translator, which hands on the plain table of a static pool.
        window_rail=False, cuda_graph_window_kv_indices=None, kv_index_translator=types.SimpleNamespace(
            read_source=lambda plan, req_pool_indices, bs: types.SimpleNamespace(
                ids=table, row_ids=req_pool_indices, row_stride=table.stride(0), entry_page_size=1, v2p=None
            )
        ),
    )
    backend.common_template = types.MethodType(backend_class.common_template, backend)
    if protected:
        protect_kv_lengths(backend, "triton")
    batch = types.SimpleNamespace(
        batch_size=3, seq_lens=torch.tensor(LENGTHS), seq_lens_cpu=torch.tensor(LENGTHS), seq_lens_sum=sum(LENGTHS),
        req_pool_indices=torch.arange(3), positions=torch.tensor(positions),
        spec_info=types.SimpleNamespace(is_draft_input=lambda: True), kv_loc_plan=None,
    )
    rows = torch.full((STEPS, 64), -1, dtype=torch.int64)
    backend.common_template(batch, rows, lambda step, batch: None)
    assert batch.positions.tolist() == positions
    return backend.kv_indptr[: STEPS - 1].tolist(), rows[: STEPS - 1].tolist()

for backend_class in (TritonMultiStepDraftBackend, FlashInferMultiStepDraftBackend):
    slots = indices(backend_class, LENGTHS, protected=False)
    assert slots[0][0] == [0, 7, 16, 27], slots[0][0]
    pruned = [6, 108, 10]
    assert indices(backend_class, pruned, protected=True) == slots
    assert indices(backend_class, pruned, protected=False) != slots, "the control"
print("both agree")
"""


def test_draft_index_arrays_count_slots_whatever_the_positions() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + _PROGRAM], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "both agree" in done.stdout


def test_trtllm_takes_no_lengths_from_positions() -> None:
    """Of a batch's positions its draft backend asks how many there are, so they may be any. It runs on no CPU."""
    folder = importlib.util.find_spec("sglang").submodule_search_locations[0]
    source = Path(folder, "srt/layers/attention/trtllm_mha_backend.py").read_text()
    uses = [
        ast.unparse(parent)
        for parent in ast.walk(ast.parse(source))
        for child in ast.iter_child_nodes(parent)
        if isinstance(child, ast.Attribute) and child.attr == "positions"
    ]
    assert set(uses) == {"forward_batch.positions.numel"}
    overridden = re.search(r"class TRTLLMHAAttnMultiStepDraftBackend.*", source, re.DOTALL).group()
    assert "def init_forward_metadata(" in overridden, "else it inherits one that does"
    assert "common_template" not in overridden


def test_a_draft_backend_whose_lengths_cannot_be_protected_ends_the_launch() -> None:
    from spec_stack.sglang.draft_kv_slots import protect_kv_lengths

    with pytest.raises(RuntimeError, match="no common_template"):
        protect_kv_lengths(SimpleNamespace(), "triton")
    with pytest.raises(ValueError, match="--speculative-draft-attention-backend"):
        protect_kv_lengths(SimpleNamespace(), "aiter")
    protect_kv_lengths(SimpleNamespace(), "fa3")
    # Where no step drafts more than one token there is none.
    protect_kv_lengths(None, "triton")
