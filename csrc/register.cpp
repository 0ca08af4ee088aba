// Registers the CUDA implementations under the schemas of dsv4_sglang/ops/schemas.py, which must have been imported.
#include <torch/csrc/stable/library.h>

#include "ops.h"

STABLE_TORCH_LIBRARY_IMPL(dsv4_sglang, CUDA, m) {
  m.impl("append", TORCH_BOX(&dsv4::append));
  m.impl("append_swa", TORCH_BOX(&dsv4::append_swa));
  m.impl("copy_state", TORCH_BOX(&dsv4::copy_state));
  m.impl("update_rows", TORCH_BOX(&dsv4::update_rows));
  m.impl("swap_blocks", TORCH_BOX(&dsv4::swap_blocks));
}
