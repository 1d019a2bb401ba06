"""A stand-in for the index helpers that SGLang imports from `sgl_kernel` on a CPU, for which no wheel exists.

Plain torch, bookkeeping only: no attention, no norm, no matrix product. No operator is registered, so SGLang's own
probe finds no AMX kernels and every layer runs its native path. A draft model's proposals are chains only: with topk
over 1 the helpers that build trees refuse. Trees that SGLang's NGRAM has made are read and verified.

A helper whose kernel on CUDA demands types of its tensors (SGLang's kernels/jit/csrc/speculative/tree.cuh) demands them
here. The other kernels there are Triton's and take any.
"""

from __future__ import annotations

import ctypes
import sys

import torch

__version__ = "0.0.0+cpu.test.support"
# SGLang imports some of these from here.
sys.modules[f"{__name__}.speculative"] = sys.modules[__name__]


def assign_req_to_token_pool_cpu(rows, req_to_token, starts, ends, out_cache_loc, pool_len):
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(rows, req_to_token, starts, ends, out_cache_loc, pool_len):
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        out_cache_loc[taken : taken + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        taken += end - start


def assign_draft_cache_locs_contiguous_cpu(rows, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps):
    width = topk * num_steps
    for index, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, length : length + width]
        out_cache_loc[index * width : (index + 1) * width] = slots.to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(req_to_token, rows, seq_lens, topk, num_steps, pool_len):
    _refuse_trees(topk)
    return req_to_token[rows.long()].clone()


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    last = torch.arange(accept_lens.shape[0]) * accept_stride + accept_lens.long() - 1
    bonus_tokens[: accept_lens.shape[0]] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc, size=None):
    accepted = accept_index.reshape(-1)[:size]
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def rotate_input_ids_cpu(*args, **kwargs):
    raise NotImplementedError("not needed for chains of a standalone draft")


def copy_all_layer_kv_cache_cpu(pointers, strides, to_slots, from_slots):
    """Copy slots in every layer's buffer, which are given as addresses and bytes per slot."""
    target, source = to_slots.long(), from_slots.long()
    if not target.numel():
        return
    size = int(max(target.max(), source.max())) + 1
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (size * stride)).from_address(pointer)
        slots = torch.frombuffer(memory, dtype=torch.uint8).view(size, stride)
        slots[target] = slots[source].clone()


def build_tree_kernel_efficient_cpu(
    parents,
    selected,
    seq_lens,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    num_tokens,
    mask_mode,
):
    """A chain: node i follows node i - 1, sees all before it, and has no sibling."""
    _refuse_trees(topk)
    pointers = {"index": retrive_index, "next token": retrive_next_token, "next sibling": retrive_next_sibling}
    _demand(torch.int64, parents=parents, selected=selected, seq_lens=seq_lens, positions=positions, **pointers)
    offset = 0
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    mask = tree_mask.view(-1)
    for row, length in enumerate(seq_lens.tolist()):
        positions.view(-1)[row * num_tokens : (row + 1) * num_tokens] = torch.arange(length, length + num_tokens)
        retrive_index[row] = torch.arange(row * num_tokens, (row + 1) * num_tokens)
        retrive_next_token[row] = torch.tensor([*range(1, num_tokens), -1])
        retrive_next_sibling[row] = -1
        if mask_mode == 1:
            mask[row * num_tokens * num_tokens : (row + 1) * num_tokens * num_tokens] = causal.reshape(-1)
        else:
            width = length + num_tokens
            mask[offset : offset + num_tokens * width].view(num_tokens, width)[:, length:] = causal
            offset += num_tokens * width


def reconstruct_indices_from_tree_mask(
    tree_mask,
    seq_lens,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    num_requests,
    num_tokens,
):
    """A tree's pointers out of its mask: entry (i, j) says that node j is node i or comes before it."""
    pointers = {"index": retrive_index, "next token": retrive_next_token, "next sibling": retrive_next_sibling}
    _demand(torch.int64, seq_lens=seq_lens, positions=positions, **pointers)
    before = tree_mask.view(num_requests, num_tokens, num_tokens).bool().tril(-1)
    retrive_index.copy_(torch.arange(num_requests * num_tokens).view(num_requests, num_tokens))
    positions.view(num_requests, num_tokens).copy_(seq_lens[:, None] + before.sum(dim=-1))
    retrive_next_token.fill_(-1)
    retrive_next_sibling.fill_(-1)
    for row in range(num_requests):
        newest: dict[int, int] = {}
        for node in range(1, num_tokens):
            parent = int(before[row, node].nonzero()[-1])
            if parent in newest:
                retrive_next_sibling[row, newest[parent]] = node
            else:
                retrive_next_token[row, parent] = node
            newest[parent] = node


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Accept drafted tokens while one of them is what the target predicts; then one token of the target's own.

    Follows a tree's first children and their siblings to where its pointers end (-1), as the CUDA kernel does.
    """
    pointers = {"index": retrive_index, "next token": retrive_next_token, "next sibling": retrive_next_sibling}
    _demand(torch.int64, candidates=candidates, target_predict=target_predict, **pointers)
    _demand(torch.int32, predicts=predicts, accept_index=accept_index, accept_token_num=accept_token_num)
    predicted = target_predict.reshape(-1).tolist()
    for row in range(candidates.shape[0]):
        drafted, nodes, children, siblings = (
            each[row].tolist() for each in (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
        )
        at = accepted = 0
        accept_index[row, 0] = nodes[0]
        while True:
            predicts[nodes[at]] = predicted[nodes[at]]
            child = children[at]
            while child != -1 and drafted[child] != predicted[nodes[at]]:
                child = siblings[child]
            if child == -1:
                break
            at, accepted = child, accepted + 1
            accept_index[row, accepted] = nodes[at]
        accept_token_num[row] = accepted


def _demand(dtype, **tensors):
    """As the kernel on CUDA does, where another type ends the scheduler."""
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")


def _refuse_trees(topk):
    if topk != 1:
        raise NotImplementedError(f"the stand-in knows chains only, got topk {topk}")
