// CUDA ops of the extension. Their schemas and contracts are in dsv4_sglang/ops (schemas.py, reference/).
#pragma once

#include <torch/csrc/stable/tensor_struct.h>

#include <optional>
#include <vector>

namespace dsv4 {

using torch::stable::Tensor;

void append(Tensor kv, std::optional<Tensor> kv_score, std::optional<Tensor> index_kv_score, Tensor kv_norm,
            std::optional<Tensor> entry_norm, std::optional<Tensor> index_norm, std::optional<Tensor> ape,
            std::optional<Tensor> index_ape, Tensor rope, double eps, int64_t ratio, int64_t kv_format,
            int64_t key_format, Tensor slots, Tensor prefix_lens, Tensor query_start, Tensor token_request,
            Tensor out_loc, std::optional<Tensor> staging_slots, Tensor ring, std::optional<Tensor> compressor_state,
            std::optional<Tensor> entries, std::optional<Tensor> index_keys, std::optional<Tensor> window,
            std::optional<Tensor> swa_pos, std::optional<Tensor> swa_head, std::optional<Tensor> tail_len);

void append_swa(Tensor raw_kv, Tensor request_slots, Tensor positions, Tensor swa_fp8, Tensor swa_rope, Tensor swa_inv,
                Tensor swa_pos, Tensor swa_head, int64_t rope_dim);

void append_v41(Tensor kv, std::optional<Tensor> kv_score, Tensor kv_norm, std::optional<Tensor> entry_norm,
                Tensor rope, double eps, int64_t ratio, Tensor slots, Tensor prefix_lens, Tensor query_start,
                Tensor token_request, Tensor out_loc, std::optional<Tensor> staging_slots, Tensor ring,
                std::optional<Tensor> compressor_state, std::optional<Tensor> entries, std::optional<Tensor> latents,
                std::optional<Tensor> window);

void append_v41_keys(Tensor keys, Tensor index_norm, Tensor rope, double eps, int64_t ratio, Tensor slots,
                     Tensor prefix_lens, Tensor query_start, Tensor token_request, Tensor out_loc, Tensor index_keys);

void copy_state(Tensor src, Tensor dst, std::vector<Tensor> tensors, std::optional<Tensor> rejected);

void gather_tables(Tensor requests, Tensor seq_lens, Tensor state_slot_of_request, Tensor req_to_token,
                   Tensor state_slots, Tensor block_table);

void swap_blocks(std::vector<Tensor> pools, Tensor host, Tensor blocks, Tensor rows, bool to_host,
                 std::vector<int64_t> offsets);

/// Steps of index_topk, called by ops/cuda_index.py. register.cpp defines their schemas.
void index_query(Tensor q, Tensor weights, Tensor positions, Tensor rope, int64_t key_format, bool hadamard, Tensor out,
                 Tensor out_weights);

void index_score(Tensor query, Tensor weights, Tensor index_keys, Tensor block_table, Tensor token_request,
                 Tensor positions, int64_t key_format, int64_t top, Tensor scores);

void index_select(Tensor scores, Tensor block_table, Tensor token_request, Tensor positions, Tensor rows);

/// The same in a selection of two levels (SPEC 11.6), for MXFP4 keys of ratio 1 or 2.
void index_score_blocks(Tensor query, Tensor weights, Tensor index_keys, Tensor block_table, Tensor token_request,
                        Tensor positions, int64_t ratio, int64_t top, bool newest, Tensor scores);

void index_select_blocks(Tensor scores, Tensor positions, int64_t ratio, Tensor blocks);

void index_score_listed(Tensor query, Tensor weights, Tensor index_keys, Tensor block_table, Tensor token_request,
                        Tensor positions, int64_t ratio, Tensor blocks, int64_t top, Tensor scores);

void index_select_listed(Tensor scores, Tensor block_table, Tensor token_request, Tensor positions, int64_t ratio,
                         Tensor blocks, Tensor rows);

}  // namespace dsv4
