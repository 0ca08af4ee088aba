"""The schemas of `torch.ops.dsv4_sglang.*`.

Every op has one schema, defined here and independent of the compiled extension. It has a PyTorch implementation for CPU
tensors (`dsv4_sglang.ops.reference`, written for readability and used as the oracle of the others), a CUDA
implementation (`csrc/` or `dsv4_sglang.attention`), and a fake one for shape propagation. The docstring of the
reference implementation documents the tensors, `dsv4_sglang.formats` their layout. Where it names ValueError, the
compiled implementation raises RuntimeError.
"""

import torch

NAMESPACE = "dsv4_sglang"

SCHEMAS = {
    "append": (
        "(Tensor kv, Tensor? kv_score, Tensor? index_kv_score, Tensor kv_norm, Tensor? entry_norm, Tensor? index_norm, "
        "Tensor? ape, Tensor? index_ape, Tensor rope, float eps, int ratio, int kv_format, int key_format, "
        "Tensor slots, Tensor prefix_lens, Tensor query_start, Tensor token_request, Tensor out_loc, "
        "Tensor? staging_slots, "
        "Tensor(a!) ring, Tensor(b!)? compressor_state, Tensor(c!)? entries, Tensor(d!)? index_keys, "
        "Tensor(e!)? window, "
        "Tensor(f!)? swa_pos, Tensor(g!)? swa_head, Tensor(h!)? tail_len) -> ()"
    ),
    "append_swa": (
        "(Tensor raw_kv, Tensor request_slots, Tensor positions, Tensor(a!) swa_fp8, Tensor(b!) swa_rope, "
        "Tensor(c!) swa_inv, Tensor(d!) swa_pos, Tensor(e!) swa_head, int rope_dim) -> ()"
    ),
    "append_v41": (
        "(Tensor kv, Tensor? kv_score, Tensor kv_norm, Tensor? entry_norm, Tensor rope, float eps, int ratio, "
        "Tensor slots, Tensor prefix_lens, Tensor query_start, Tensor token_request, Tensor out_loc, "
        "Tensor? staging_slots, "
        "Tensor(a!) ring, Tensor(b!)? compressor_state, Tensor(c!)? entries, Tensor(d!)? latents, "
        "Tensor(e!)? window) -> ()"
    ),
    "append_v41_keys": (
        "(Tensor keys, Tensor index_norm, Tensor rope, float eps, int ratio, Tensor slots, Tensor prefix_lens, "
        "Tensor query_start, Tensor token_request, Tensor out_loc, Tensor(a!) index_keys) -> ()"
    ),
    "index_topk": (
        "(Tensor q, Tensor weights, Tensor index_keys, Tensor block_table, Tensor token_request, Tensor positions, "
        "Tensor rope, int key_format, Tensor(a!) scores, Tensor(b!) entry_indices, int ratio=4, bool hadamard=True, "
        "int candidate_block=0, Tensor(c!)? kept=None, Tensor? within=None) -> ()"
    ),
    "attend": (
        "(Tensor q, Tensor sink, Tensor window, Tensor window_indices, Tensor window_lens, Tensor? entries, "
        "Tensor? entry_indices, Tensor? entry_lens, Tensor positions, Tensor rope, float scale, "
        "int kv_format, Tensor? entry_owner=None, int? entry_format=None) -> Tensor"
    ),
    "copy_state": "(Tensor src, Tensor dst, Tensor(a!)[] tensors, Tensor(b!)? rejected=None) -> ()",
    "gather_tables": (
        "(Tensor requests, Tensor seq_lens, Tensor state_slot_of_request, Tensor req_to_token, "
        "Tensor(a!) state_slots, Tensor(b!) block_table) -> ()"
    ),
    "swap_blocks": (
        "(Tensor(a!)[] pools, Tensor(b!) host, Tensor blocks, Tensor rows, bool to_host, int[] offsets) -> ()"
    ),
}

# Must live as long as the process: dropping a Library removes its registrations.
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def _writes_only(*args: object) -> None:
    """Fake implementation of ops that return nothing and write to their arguments."""


def _like_queries(q: torch.Tensor, *args: object) -> torch.Tensor:
    """Fake implementation of the attention ops."""
    return torch.empty_like(q, memory_format=torch.contiguous_format)


for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema)
    _fake = _like_queries if _schema.endswith("-> Tensor") else _writes_only
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=LIBRARY)
