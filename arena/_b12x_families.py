"""The families of B12X that `arena.b12x` knows: which calls of theirs launch, and which fields of their bindings a captured
launch points to. Data for that module alone; checked against the real wheels by tests/test_b12x.py.
"""

# (distribution, version): what these tables were checked against. FlashInfer carries a B12X of its own.
KNOWN = {("b12x", "1.2.6"), ("b12x", "1.5.0"), ("b12x", "1.5.1"), ("flashinfer-python", "0.7.4")}
ROOTS = ("b12x", "flashinfer.b12x", "flashinfer.experimental.b12x")

# Module: its calls that launch. What a family named otherwise in another version is here under both names.
CALLS = {
    "attention._shared.contiguous.api": "b12x_attention_forward b12x_varlen_attention_forward",
    "attention._shared.mla.api": "sparse_mla_decode_forward sparse_mla_extend_forward",
    "attention._shared.mla.compressed_api": "compressed_mla_decode_forward",
    "attention.compressed_sparse_mla._preparation": "run",
    "attention.compressed_sparse_mla.cache_writer": "write_cache",
    "attention.dense_mla.api": "run",
    "attention.dsa_indexer.api": "run score select quantize_q_mxfp4 quantize_write_index_k_mxfp4",
    "attention.dsa_indexer.persistent_topk": "run_persistent_topk2048",
    "attention.mla_compress._impl": "run",
    "attention.nsa_indexer._impl": "paged_decode_logits contiguous_logits msa_paged_decode_block_scores "
    "msa_contiguous_block_scores contiguous_tiled_topk msa_q2k_indices_decode msa_q2k_indices_prefill",
    "attention.nsa_indexer.paged": "index_topk_fp8",
    "attention.nsa_indexer.persistent_topk": "run_persistent_topk2048",
    "attention.paged._forward": "paged_attention_forward",
    "attention.paged.api": "run",
    "attention.qsa._contract": "run select attend attend_reuse",
    "attention.sparse_mla.api": "run concat_and_cache_glm_next_mla concat_and_cache_glm_next_mla_fp8 "
    "concat_and_cache_glm_next_mla_nvfp4",
    "attention.sparse_mla.pooled_selection": "expand_pooled_topk_to_physical_slots",
    "attention.sparse_mla.strided": "run_decode run_extend",
    "attention.varlen._preparation": "run run_batched",
    "comm.pcie.pcie_dcp_a2a": "kimi_topk16",
    "gemm._bmm.api": "bmm",
    "gemm._shared.block_fp8": "block_fp8_linear_mxfp8 quantize_block_fp8_linear_input_mxfp8",
    "gemm._shared.wo_mxfp8": "wo_projection_mxfp8 wo_projection_inv_rope_mxfp8 WOProjectionBinding.run "
    "WOProjectionInvRopeBinding.run",
    "gemm.bf16_gemv.api": "mm",
    "gemm.bf16_vocab_projection._contracts": "run",
    "gemm.blockscaled._a16": "w4a16 w8a16",
    "gemm.blockscaled._linear": "blockscaled_mm",
    "gemm.blockscaled.api": "mm_mxfp4 mm_nvfp4 mm_block_fp8",
    "gemm.mla_query_projection.api": "run",
    "gemm.trellis_linear.api": "run",
    "gemm.wo_projection.api": "run run_inv_rope quantize_input quantize_input_inv_rope quantize_input_b",
    "moe.ep_moe._impl": "b12x_ep_moe_fp4 _run_bound_ep_moe",
    "moe.fused_moe._impl": "b12x_moe_fp4 b12x_sparse_moe_fp4 b12x_route_experts_fast",
    "moe.fused_moe.api": "run_fc2 route_topk",
    "norm.hyperconnection.api": "run_grouped_rmsnorm run_scaled_silu run_gate_mean run_combine run_combine_norm "
    "run_engram_mix run_swiglu run_add run_sigmoid",
    "norm.mhc._impl": "b12x_mhc_pre b12x_mhc_post b12x_mhc_post_pre run_collapse",
    "norm.vision": "run_gelu run_spatial_merge run_rope_qkv",
    "preparation.types": "plan_from_handle",
    "quantization.mxfp8._preparation": "quantize_rows",
    "quantization.nvfp4.api": "run",
    "sequence.embedding.api": "run",
    "sequence.engram._impl": "run run_lookup run_lookups",
    "sequence.gdn_decode._commit": "run_kda_commit",
    "sequence.gdn_decode._impl": "run run_kda",
    "sequence.gdn_prefill._impl": "run",
    "sequence.kda_prefill._impl": "run",
    "sequence.mtp_feedback._impl": "run",
    "sequence.ple._contracts": "run_decode run_mixed run_prefill",
    "sequence.ple_embedding._contracts": "run",
    "sequence.ple_hash._contracts": "run",
}

# Class of a binding: the fields that are retained, scratch first. What is left out is its caller's: activations, outputs,
# weights and caches. A field that a version lacks is passed over.
KEPT = {
    "attention._shared.contiguous.api.AttentionBinding": "lse plan",
    "attention._shared.contiguous.api.VarlenAttentionBinding": "lse cu_seqlens_q cu_seqlens_k plan",
    "attention._shared.mla.merge.SparseMLASplitDecodeMergeBinding": "scratch tmp_output tmp_lse num_chunks_ptr",
    "attention._shared.static_fp8_quant.Binding": "output",
    "attention.compressed_mla._scratch.B12XCompressedMLABinding": "scratch swa_indices swa_lengths indexed_lengths "
    "indexed_page_table",
    "attention.compressed_sparse_mla._scratch.B12XCompressedSparseMLABinding": "scratch swa_indices swa_lengths "
    "indexed_lengths indexed_page_table plan",
    "attention.dense_mla._scratch.Binding": "scratch page_table cache_seqlens cu_seqlens_q query_quant",
    "attention.dense_mla.api.Binding": "runtime plan",
    "attention.dsa_indexer.api.Binding": "runtime plan",
    "attention.dsa_indexer.mxfp4.MXFP4Binding": "runtime plan",
    "attention.dsa_indexer.mxfp4.MXFP4Runtime": "scratch page_table cache_lengths active_width candidate_lengths",
    "attention.dsa_indexer.persistent_topk.B12XPersistentTopK2048Binding": "scratch lengths page_table_1",
    "attention.dsa_indexer.scratch.B12XIndexerContiguousBinding": "scratch metadata tile_logits lengths candidate_values "
    "candidate_indices merge_positions",
    "attention.dsa_indexer.scratch.B12XIndexerMSAContiguousBinding": "scratch metadata topk_score_scratch topk_values "
    "topk_indices sort_values sort_indices",
    "attention.dsa_indexer.scratch.B12XIndexerMSAPagedBinding": "scratch metadata real_page_table cache_seqlens_int32 "
    "active_width schedule_metadata page_scores topk_score_scratch topk_values topk_indices sort_values sort_indices "
    "expanded_page_table expanded_seqlens",
    "attention.dsa_indexer.scratch.B12XIndexerPagedBinding": "scratch metadata real_page_table cache_seqlens_int32 "
    "active_width schedule_metadata",
    "attention.mla_compress._impl.Binding": "query_start_loc positions state_ids destination_slots live_counts pending_values "
    "pending_gates pending_position _state plan",
    "attention.paged._scratch.B12XPagedAttentionBinding": "scratch q2k_indices plan",
    "attention.qsa._contract.Binding": "scratch main_block_table compressed_block_table raw_logical_positions "
    "raw_rope_positions raw_interval_start_positions raw_state_slot_ids prepared_index_query scores eligible_group_counts "
    "merge_lengths topk_values topk_group_ids topk_values_b topk_group_ids_b partial_output partial_lse output_lse "
    "selection_stream _selection_done draft_selection _draft_work_positions state plan",
    "attention.sparse_mla._paged_index_remap.Binding": "request_ids block_table physical_indices selected_counts",
    "attention.sparse_mla._scratch.B12XSparseMLABinding": "scratch cache_seqlens_int32 nsa_cache_seqlens_int32",
    "attention.sparse_mla.api.Binding": "runtime plan",
    "attention.sparse_mla.strided.Binding": "native query_quant index_remap plan",
    "attention.varlen._preparation.BatchedBinding": "binding sink_storage plan",
    "attention.varlen._preparation.VarlenBinding": "binding sink_storage block_indices block_offsets plan",
    "gemm._shared.block_fp8.BlockFP8LinearBinding": "x_q workspace plan",
    "gemm._shared.wo_mxfp8.WOProjectionBinding": "x_q tmp tmp_q plan",
    "gemm._shared.wo_mxfp8.WOProjectionInvRopeBinding": "x_q tmp tmp_q positions plan",
    "gemm.bf16_vocab_projection._contracts.Binding": "plan",
    "moe._shared.kernels.w4a16.mixed_trellis.MixedTrellis3Binding": "all",
    "moe._shared.kernels.w4a16.mixed_trellis.MixedTrellisBinding": "all",
    "moe.ep_moe._impl.EPMoEFP4Binding": "all but a experts topk_weights topk_ids output",
    "moe.fused_moe._impl.TPMoEFP4Binding": "all but a experts topk_weights topk_ids output output_cast_target activation_amax",
    "moe.fused_moe._impl.TPMoERouteBinding": "scratch plan",
    "moe.fused_moe._impl.TPMoESparseFP4Binding": "scratch plan",
    "norm.hyperconnection._impl.HyperConnectionBinding": "state plan",
    "norm.mhc._impl.B12XMHCBinding": "partials state plan",
    "sequence._shared.delta_prefill.contract.Binding": "scratch band_base sorted_seq rank_of pos_seq pos_local window_table "
    "ready_flags ws cu_seqlens initial_state_indices final_state_indices checkpoint_state_indices checkpoint_offsets "
    "num_seqs num_tokens _state plan",
    "sequence.engram._impl.Binding": "scratch query_start_loc request_slots committed_history num_seqs num_tokens compressed "
    "request_ids _state plan",
    "sequence.engram._impl.LookupBinding": "num_tokens disk_table _state plan",
    "sequence.gdn_decode._commit.KdaCommitBinding": "scratch tensors plan",
    "sequence.gdn_decode._impl.Binding": "scratch query_start_loc num_accepted_tokens state_indices num_seqs num_tokens "
    "_state plan",
    "sequence.gdn_decode._impl.KdaBinding": "scratch query_start_loc num_accepted_tokens state_indices num_seqs num_tokens "
    "_state plan",
    "sequence.gdn_prefill._impl.Binding": "scratch band_base sorted_seq rank_of pos_seq pos_local window_table ready_flags ws "
    "cu_seqlens initial_state_indices final_state_indices checkpoint_state_indices checkpoint_offsets num_seqs num_tokens "
    "_state plan parallel",
    "sequence.gdn_prefill._parallel.ParallelBinding": "all",
    "sequence.kda_prefill._impl.Binding": "scratch band_base sorted_seq rank_of pos_seq pos_local window_table ready_flags ws "
    "cu_seqlens initial_state_indices final_state_indices checkpoint_state_indices checkpoint_offsets num_seqs num_tokens "
    "_state plan",
    "sequence.mtp_feedback._impl.Binding": "scratch token_normalized state_partial_sums state_normalized token_path _state "
    "plan",
    "sequence.ple._contracts.LayerBinding": "scratch query_start_loc state_slot_ids state_is_fresh num_accepted_tokens "
    "num_seqs num_tokens request_is_prefill normalized_u gathered_state request_ids _state plan",
    "sequence.ple_embedding._contracts.Binding": "scratch query_start_loc committed_history num_seqs num_tokens _ids "
    "_hash_scratch _hash_binding disk_table _state plan",
    "sequence.ple_hash._contracts.Binding": "scratch geometry query_start_loc committed_history num_seqs num_tokens "
    "request_ids _state plan",
}

# `retain(plan)` keeps what the plan was prepared with, too.
PLANS = ("preparation.types.Plan", "preparation.types._CompositePlan")
