"""Names of other packages that are private there, and what they are used for: what to look at when torch changes.

A test compares the list with the code; where nothing else is said, the name is torch's and nothing public does the job.

Modules
- `_parameters`, `_buffers`, `_modules`, `_non_persistent_buffers_set`: tensors are put in place of others without the
  checks of `setattr`, ties kept
- `_forward_hooks`, `_forward_pre_hooks`, `_forward_hooks_with_kwargs`, `_forward_pre_hooks_with_kwargs`,
  `_forward_hooks_always_called`, `_backward_hooks`, `_backward_pre_hooks`, `_is_full_backward_hook`: a module takes the
  hooks of one whose place it takes; which hooks a block has
- `_state_dict_hooks`, `_state_dict_pre_hooks`, `_load_state_dict_post_hooks`, `_load_state_dict_pre_hooks`,
  `_register_load_state_dict_pre_hook`: likewise those on its state dicts, and in which order they run
- `_apply`, `_load_from_state_dict`, `torch.nn.modules.module._IncompatibleKeys`: what `.to` and `load_state_dict` do
- `_compiled_call_impl`: what a compiled module runs, which is not copied
- `_reset_parameters`, `_init_weights`, `_initialize_weights`: initial rules of torch's and Transformers' modules
- `_flat_weights`: of recurrent modules, which keep their weights in it too, and keep it current
- `_NormBase`, `_DropoutNd`: bases by which kinds of modules are told
- `_n_heads`: what some attentions call their number of heads
- `_tp_plan`, `_experts_implementation`: of Transformers, which weights its models split, and how they run experts

Tensors
- `_make_wrapper_subclass`: a tensor without values of its own
- `_base`, `_is_view`, `_version`: whether a tensor is a view, and was written to
- `_cdata`: which storage a meta tensor has
- `_values`: of a sparse gradient
- `_post_accumulate_grad_hooks`: a parameter takes the hooks of one whose place it takes
- `_C`, `_to_copy`, `_c10d_functional`, `_schema`: operators, and what they write
- `_C`, `_functorch`: whether a tensor is one of torch.func's, which has no memory
- `torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack`: what adds up a gradient, inside of torch.func too
- `_calculate_fan_in_and_fan_out`: fans of a table are the whole's
- `_random`, `_rng_tracker`: where torch keeps what counts the numbers that are drawn in DTensors
- `torch.utils._python_dispatch.TorchDispatchMode`: which tensors an initial rule writes, what an
  optimizer takes numbers of
- `torch.utils._pytree.tree_map`, `torch.utils._pytree.tree_leaves`: what FSDP2 itself walks outputs with

Optimizers, gradients and scaling
- `_in_backward_optimizers`, `_optimizer_classes`, `_optimizer_kwargs`,
  `torch.distributed.optim._apply_optimizer_in_backward`: optimizers that the user had applied in the backward pass
- `torch.distributed.optim.apply_optimizer_in_backward.param_to_acc_grad_map`, its `param_to_optim_hook_handle_map`:
  where torch keeps the parameters of these, see `dmp/wrap/earlier/let_go.py`
- `_setup_in_backward_optimizers`: how DDP updates parameters that have these, which is done another way
- `_optimizer_state_dict_post_hooks`: whether an optimizer has been through its base's `__init__`
- `_unscale_grads_`, `_amp_foreach_non_finite_check_and_unscale_`: the one place where a scaler looks at gradients
- `_foreach_copy_`: pieces for many ranks, copied to their places at once
- `_get_total_norm`, `_clip_grads_with_norm_`, `_group_tensors_by_device_and_dtype`: for torch's own clipping
- `torch.utils.checkpoint._StopRecomputationError`: a forward that is computed again has come as far as is needed
- `_current_graph_task_id`, `_will_engine_execute_node`, `_execution_engine`: whether a backward pass runs
- `_autograd`, `_get_current_graph_task_keep_graph`: whether a backward pass retains the graph
- `_autograd`, `_top_saved_tensors_default_hooks`: whether a part of a branch is to be computed again
- `_engine_run_backward`: what a backward pass is asked for; the frame at which a hanging rank is in one
- `_library`: a folder of torch's, frames of which are around what a hanging rank waits in
- `_saved_dim`, `_saved_reduction`, `_dispatch_get_all_op_names`: what an operation in a graph goes over, and which one
  of torch's it is
- `_saved_self`, `_saved_other`, `_input_metadata`: what an operation in a graph multiplies by, and the shape of what it
  gives

FSDP2 and DDP
- `_get_fsdp_state`, `_fsdp_param_groups`, `_lazy_init`, `_register_pre_backward_hook`, `_get_grad_inner_tensor`,
  `_training_state`, `_state_ctx`, `torch.distributed.fsdp._common_utils.collect_grad_tensors`: who had no gradient,
  what a unit waits for, what it gathers, and whether a backward pass has ended
- `_pre_forward`, `_post_forward`, `_cast_forward_inputs`: what is gathered with the root, called past its forward
- `_register_root_post_backward_final_callback`, `_root_post_backward_final_callback`: whether a pass came by, its end
- `_all_gather_comm`, `_reduce_scatter_comm`, `_all_gather_process_group`,
  `torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather`,
  `torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultReduceScatter`: what a unit exchanges with
- `_sharded_state`, `_setattr_on_modules`, `_unsharded_param`, `_sharded_post_forward_param`: a state dict without
  freeing what a unit has gathered
- `_local_tensor`, `_sharded_local_tensor`, `_unsharded_inner_tensors`, `_orig_size`, `_contiguous_orig_stride`: what a
  model writes into gathered weights, put into this rank's chunks
- `_param_fqn`: which weight a model casts while it runs
- `torch.distributed.fsdp._fully_shard._fully_shard._unimplemented_deepcopy`,
  `torch.distributed.fsdp._fully_shard._fully_shard.cls_to_fsdp_cls`,
  `torch.distributed._composable.replicate_with_fsdp.ReplicateModule`,
  `torch.distributed._composable.replicate_with_fsdp.cls_to_replicate_cls`, `_orig_cls_mro_index`: the class that a
  module gets which is split, where it cannot change to the one that torch makes
- `_op_dispatcher`, `_custom_op_handlers`, `_local_scalar_dense`: a number that is made of a DTensor
- `_wrapped_call_impl`: the frame at which a module is called, past what gathers its weights
- `_module_info`: what lies in the place of a weight that is split
- `_module_parameters`, `_build_params_for_reducer`, `_rebuild_buckets`, `_distributed_broadcast_coalesced`: DDP's
  reducer, which gradients it takes for sparse, and its buffers
- `_get_ddp_logging_data`: what Lightning asks of a DDP
- `_join_config`: whether ranks make different numbers of steps, by torch's `Join`
- `_reset_state`, `_get_sequence_number_for_group`: after a backward pass that raised, and
  whether it did at the same point on all ranks
- `_ddp_params_and_buffers_to_ignore`, `_set_params_and_buffers_to_ignore_for_model`: what DDP leaves alone
- `torch.distributed._composable.contract.REGISTRY_KEY`, `torch.distributed._composable.contract.RegistryItem`: what
  `fully_shard` passes over
- `torch.distributed._composable.replicate_with_fsdp.replicate`: FSDP2's way to replicate
- `torch.distributed._composable.checkpoint_activation.checkpoint`: checkpointed blocks under their own names
- `torch.distributed._composable.checkpoint_activation`, `_no_hook`: these in as many backward passes as there are

Profiles
- `_C`, `_profiler`, `_RecordFunctionFast`: a range in a profile at a twentieth of what the public one takes

Groups, meshes, DTensor
- `_get_default_store`, `_new_process_group_helper`, `_world`: a group made by its own ranks alone, its store known
- `_flatten`, `_concatenate`: one mesh out of several axes
- `_get_root_mesh`: which axes there are besides those that a DTensor lies on
- `_storage_Use_Count`, `_cdata`: whether a program holds views of a table's memory beside the parameter
- `torch._C._distributed_c10d._register_process_group`, `torch._C._distributed_c10d._resolve_process_group`,
  `_distributed_c10d`, `_create_work_from_future`, `_dim_group_names`, `_pg_registry`, `_thread_id`, `_op_dispatcher`:
  ranks simulated in threads
- `torch.distributed._shard.metadata.ShardMetadata`, `torch.distributed._shard.sharded_tensor.shard.Shard`,
  `torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata`,
  `torch.distributed._shard.sharded_tensor.metadata.TensorProperties`: what code that reads a ShardedTensor knows
- `torch.distributed.tensor.placement_types._StridedShard`: a share of each of several weights that are held in one,
  query, key and value
- `_prepare_output_fn`: a parallel style whose output keeps its layout
- `torch.distributed.tensor._api._FromTorchTensor`, `torch.distributed.tensor._api._normalize_placements_for_grad`: the
  conversion whose backward loses what a second one needs

Checkpoints
- `_save`, `_save_optimizer_and_scheduler`: where Transformers' `Trainer` writes
- `_distribute_tensors`: where torch takes a rank's part of a whole tensor
- `_maybe_full_or_cpu_state_dict`, `_verify_options`, `_load_model_state_dict`, `_load_optim_state_dict`: where torch's
  functions for state dicts make whole tensors, where each begins, and what loads
- `_ThreadBasedAsyncCheckpointExecutor`, `_save_state_dict`: where a thread of torch's begins to save, and every save
- `torch.distributed.checkpoint.state_dict_saver._save_state_dict`: saving without the warning of `save`
- `_rebuild_tensor_v2`, `_rebuild_tensor_v3`, `_StorageInfo`, `_StoragePrefix`, `_MEM_FORMAT_ENCODING`, `_get_layout`:
  as they stand in files; nothing of these names is called

Managed collision, of TorchRec
- `_zch_size`, `_buckets`, `_input_hash_func`, `_input_hash_size`, `_output_global_offset`, `_eviction_policy`,
  `_eviction_interval`, `_decay_exponent`, `_threshold_filtering_func`, `_allow_in_place_embed_weight_update`: what its
  modules and policies were made with
- `_e_sharder`: the sharder of the tables in its sharder
- `_mch_sorted_raw_ids`, `_mch_remapped_ids_mapping`, `_mch_slots`, `_current_iter_tensor`,
  `_output_segments_tensor`: buffers that keep their names
- `_current_iter`, `_last_eviction_iter`, `_history_accumulator`, `_history_metadata`, `_input_history_buffer_size`,
  `_current_history_buffer_offset`: what a map has seen before it is sharded

Compiling
- `torch._C._dynamo.eval_frame.get_eval_frame_callback`: whether code runs in what torch.compile runs, where it is not
  traced itself: a class of tensors made there would come to code that is, which does not take it
- `_dynamo_static_input_type`: an attribute of a parameter that is torch's, and stays where it is
- `torch._compile._disable_dynamo`: what reads memory by its address is not traced; the public one would import the
  compiler at once

- `_C`, `_get_dispatch_mode`, `_TorchDispatchModeKey`: whether tensors are fake, whose memory nobody may read

Others
- `_FabricOptimizer`: Lightning's wrapper of an optimizer, which hands steps on
- `_embedding_names`, `_feature_names`, `_feature_processors`: of TorchRec's collections
- `_emb_modules`, `_emb_module`, `_embedding_tables`, `_key_to_tables`: FBGEMM's modules in its fused collections, and
  which tables each has
- `_embedding_bag_collection`: where TorchRec's modules around a collection hold it
- `torch.distributed._shard.metadata.ShardMetadata`,
  `torch.distributed._shard.sharding_spec.api.EnumerableShardingSpec`: of which TorchRec's plans consist
- `_ebc_sharder`, `_e_sharder`, `_comm_precision`, `_loss_scale`, `_bucket_cap_mb`, `_ddp_kwargs`,
  `_additional_params_to_ignore`, `_allreduce_comm_precision`, `_storage_reservation`, `_topology`, `_constraints`,
  `_batch_size`, `_percentage`, `_hbm_reserved_bytes`, `_dense_tensor_estimate`: of TorchRec's sharders, codecs,
  data-parallel wrapper and planner: what they were made with
- `torch.distributed._shard.sharded_tensor.api.ShardedTensorBase`, `_init_from_local_shards_and_global_metadata`: for a
  `ShardedTensor` without a process group, of the chunks that are there
- `_all_gather_sharded_tensor`, `_flatten_sharded_tensors`,
  `torch.distributed.checkpoint._traverse.traverse_state_dict`, `torch.distributed.checkpoint._traverse.set_element`:
  what torch does to a `ShardedTensor` that is wrong for chunks
- `_set_module_context`, `_pipeline_model`, `_init_pipelined_modules`, `_create_context`, `_wait_for_batch`,
  `_copy_batch_to_gpu`, `_prefetch`, `_connect`: parts of TorchRec's pipelines, for a message to who calls or overrides
  them
- `_save_param_groups`, `_warmup_param`: of TorchRec's keyed optimizers
- `_current_frames`, `_current_exceptions`, `_getframe`: of Python's `sys`, where threads stand, which error they
  handle, and which code reads a weight
"""
