// Registers the CUDA implementations for the schemas of dsv4_sglang/ops/schemas.py, which must have been imported, and
// the steps of index_topk, which exist for CUDA only.
#include <torch/csrc/stable/library.h>

#include "ops.h"

STABLE_TORCH_LIBRARY_FRAGMENT(dsv4_sglang, m) {
  m.def(
      "index_query(Tensor q, Tensor weights, Tensor positions, Tensor rope, int key_format, bool hadamard, Tensor(a!) "
      "out, "
      "Tensor(b!) out_weights) "
      "-> ()");
  m.def(
      "index_score(Tensor query, Tensor weights, Tensor index_keys, Tensor block_table, Tensor token_request, Tensor "
      "positions, "
      "int key_format, int top, Tensor(a!) scores) -> ()");
  m.def(
      "index_select(Tensor scores, Tensor block_table, Tensor token_request, Tensor positions, Tensor(a!) rows) -> ()");
  m.def(
      "index_score_blocks(Tensor query, Tensor weights, Tensor index_keys, Tensor block_table, Tensor token_request, "
      "Tensor positions, int ratio, int top, bool newest, Tensor(a!) scores) -> ()");
  m.def("index_select_blocks(Tensor scores, Tensor positions, int ratio, Tensor(a!) blocks) -> ()");
  m.def(
      "index_score_listed(Tensor query, Tensor weights, Tensor index_keys, Tensor block_table, Tensor token_request, "
      "Tensor positions, int ratio, Tensor blocks, int top, Tensor(a!) scores) -> ()");
  m.def(
      "index_select_listed(Tensor scores, Tensor block_table, Tensor token_request, Tensor positions, int ratio, "
      "Tensor "
      "blocks, Tensor(a!) rows) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dsv4_sglang, CUDA, m) {
  m.impl("append", TORCH_BOX(&dsv4::append));
  m.impl("append_swa", TORCH_BOX(&dsv4::append_swa));
  m.impl("append_v41", TORCH_BOX(&dsv4::append_v41));
  m.impl("append_v41_keys", TORCH_BOX(&dsv4::append_v41_keys));
  m.impl("copy_state", TORCH_BOX(&dsv4::copy_state));
  m.impl("gather_tables", TORCH_BOX(&dsv4::gather_tables));
  m.impl("swap_blocks", TORCH_BOX(&dsv4::swap_blocks));
  m.impl("index_query", TORCH_BOX(&dsv4::index_query));
  m.impl("index_score", TORCH_BOX(&dsv4::index_score));
  m.impl("index_select", TORCH_BOX(&dsv4::index_select));
  m.impl("index_score_blocks", TORCH_BOX(&dsv4::index_score_blocks));
  m.impl("index_select_blocks", TORCH_BOX(&dsv4::index_select_blocks));
  m.impl("index_score_listed", TORCH_BOX(&dsv4::index_score_listed));
  m.impl("index_select_listed", TORCH_BOX(&dsv4::index_select_listed));
}
