"""What this code changes beyond its own objects: of the process, of other packages, of others' objects; and why.

A test compares the list with the code. Nothing else may change what it did not make. What is for a while is put back
by who changed it; what threads share is under a lock, or is set where it was found otherwise alone.

For the whole process, while it lasts
- `sharders/quiet.py: warnings.catch_warnings`, `sharders/quiet.py: warnings.simplefilter`,
  `sharders/quiet.py: logging.disable`: a model's code is run for a look, and FBGEMM imported, without what they would
  tell the user; one thread at a time
- `dmp/collection.py: gc.disable`, `dmp/collection.py: gc.enable`: while a model is wrapped or planned, or a
  waiting thread's frames are read; who finds it disabled leaves it so
- the threads of NumPy's OpenBLAS are one while a model is planned (planner/one_thread.py); who finds one leaves it so
- `dmp/checkpoint/targets/native.py: torch.serialization.set_crc32_options`: while a checkpoint is written, where the
  program has them off, for a checkpoint without checksums cannot be checked; one save runs at a time
- `dmp/ranks/watchdog.py: atexit.register`: the watchdog says goodbye, so that no rank waits for this one,
  and gloo's threads are given a moment, without which one in eight programs aborts
- `dmp/ranks/watchdog.py: os.register_at_fork`: a forked process knows that it exchanges for no rank, where it
  would wait for ever

For the whole process, once
- `dmp/wrap/outer_wrappers.py: DistributedDataParallel.__init__ =`: DDP over a wrapped model would average pieces of
  different tables; nothing but its construction tells
- `dmp/state/scaler.py: torch.amp.GradScaler._unscale_grads_ =`, `dmp/state/scaler.py: torch.amp.GradScaler.scale =`:
  one decision on all ranks where torch's scaler scales a wrapped model's gradients; other models' are left alone
- `dmp/wrap/optimizers/optimizer_guard.py: register_optimizer_step_pre_hook`,
  `dmp/wrap/optimizers/step_turns.py: register_optimizer_step_pre_hook`,
  `sharders/before_steps.py: register_optimizer_step_pre_hook`,
  `sharders/embedding/weights/seen_part.py: register_optimizer_step_post_hook`: an optimizer may be made before the
  model is wrapped
- `sharders/data_parallel/blocks.py: checkpoint_activation._no_hook =`: a block that torch's composable checkpoint
  computes again is computed so by more than one backward pass
- `dmp/ranks/backward.py: torch.autograd._engine_run_backward =`: every backward pass goes by it. What torch says of
  plain tensors beside DTensors says what to do, too; gradients asked for of weights that wrapping has replaced are
  those of what is in their places; who asks for those of what FSDP2 has split gets them, or is told; a term of the
  loss that is wrong on a part of a table is told when the pass is done, and what scales one that is right is averaged
  over the ranks
- torch's list of the classes of split modules has more of them (sharders/data_parallel/classes.py), for those kinds of
  modules that cannot change to the class that torch would make, or would hear of it
- `dmp/state/numbers.py:
  DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] =`: a number that is
  made of what is split says that it is a rank's share
- where there are no devices, torch's DTensors have what draws in them by the place of each part (dmp/state/drawn.py):
  its own is for devices alone
- `dmp/state/numbers.py: DTensor.numpy =`, `dmp/state/numbers.py: DTensor.tolist =`: where torch refuses an array or a
  list of what is split, the error says what gives the whole
- `sharders/data_parallel/whole_read.py: DTensor.full_tensor =`: gradients of what it gives of weights that FSDP2 has
  split are averaged over the ranks with other samples, as FSDP2 does what it gathers itself
- `sharders/embedding/weights/drawn_later.py: function.__code__ =`: of torch.nn.init's, so that what they draw in a
  part of a table is of the whole's fans, and takes one number of the program's generator on every rank
- `sharders/tensor_parallel/split/twice.py: _FromTorchTensor.backward =`: torch's loses the graph that `create_graph`
  asks for
- `dmp/wrap/optimizers/optimizer_guard.py: Optimizer.zero_grad =`: an optimizer around another may make no step of
  torch's itself
- `sharders/data_parallel/unfinished.py: Optimizer.zero_grad =`: it clears what waits for its average, too
- `dmp/state/kinds.py: Optimizer.zero_grad =`: with `set_to_none=False` it takes no plain tensors beside DTensors
- `dmp/ranks/launch.py: dist.init_process_group`, `dmp/ranks/launch.py: torch.accelerator.set_device_index`: a program
  that a launcher started and that has no group yet gets one, on the device of its rank
- `dmp/checkpoint/background.py: dist.ProcessGroup.shutdown =`: `destroy_process_group` waits for the save that runs
- `dmp/state/chunks_of_state.py: Optimizer.state_dict =`, `dmp/state/chunks_of_state.py: Optimizer.load_state_dict =`:
  chunks of tables are given and taken as chunks, which torch's checkpoint would take for the whole; so do TorchRec's
  keyed optimizers, where they are imported; its clipping refuses what it would pass over (dmp/state/keyed_clipping.py)
- DTensors that are several rectangles on a rank, as torch's distributed checkpoint does not know of its own strided
  shards, tell it of all, and whole tensors are cut so where torch loads them (dmp/state/strided_shards.py)
- `dmp/chunked.py: torch.serialization.add_safe_globals`: `torch.load` knows what a rank has written of its chunks
- torch.compile is told of classes of tensors that it does not take (sharders/embedding/weights/seen_part.py,
  sharders/tensor_parallel/split/followed.py)
- `all_reduce`, `broadcast`, `reduce` and `scatter` of torch.distributed refuse parts of a wrapped model's tensors,
  which they would mix with other parts (dmp/state/by_hand.py)
- torch's checkpoint keeps in a state dict what a rank has no chunk of, and what torch gathers of a `ShardedTensor` is
  ours of chunks, where these are imported (dmp/state/torch_state_dict.py); torchsnapshot's reader takes chunks for what
  it asks for by type (dmp/state/snapshots.py)
- torch's `get_state_dict` and its like, where they are imported, give such chunks whole where whole tensors are asked
  for; its reader of `torch.save` files refuses what its ranks would wait for, and its saves in the background have
  connections of their own, those without other ranks are made by all or none (dmp/state/torch_state_dict.py)
- `dmp/state/safetensors_files.py: safetensors.storage_ptr =`, and Accelerate's `id_tensor_storage`, where they are
  imported: what they say of weights that are split says what to do
- Transformers' `Trainer`, where it is imported, gathers split weights, and their optimizer's state, before its first
  rank writes them (dmp/state/trainer_saves.py)
- TorchRec's abstract classes of sharded modules, where they are imported, are told that ours count as theirs, by
  Python's registration of virtual subclasses (sharders/embedding/torchrec_form.py): scans by class find them
- `sharders/embedding/torchrec_form.py: KeyedTensor.wait =`: scripts wait for what TorchRec's sharded collections give;
  what ours give is there

Of processes of our own, that `python -m dmp calibrate` starts to measure together
- `planner/costs/local_ranks.py: dist.init_process_group`, `planner/costs/local_ranks.py: dist.destroy_process_group`,
  `planner/costs/local_ranks.py: torch.set_num_threads`, `planner/costs/local_ranks.py: warnings.simplefilter`,
  `planner/costs/local_ranks.py: torch.accelerator.set_device_index`: each is a rank, of one thread and one device

Of a thread of our own
- `dmp/checkpoint/background.py: os.setpriority`: a save in the background steps back behind the training

The generators of random numbers
- `dmp/checkpoint/random_state.py: torch.manual_seed`, `dmp/checkpoint/random_state.py: torch.set_rng_state`,
  `dmp/checkpoint/random_state.py: torch.get_device_module(device).set_rng_state`: what `load_checkpoint` promises
- `sharders/tensor_parallel/sharder.py: torch.get_device_module(mesh.device_type).set_rng_state`: ranks that hold one
  activation must drop the same of it
- `sharders/tensor_parallel/split/own_parts.py: torch.default_generator.manual_seed`,
  `sharders/tensor_parallel/split/own_parts.py: torch.set_rng_state`,
  `sharders/tensor_parallel/split/own_parts.py: of_device.set_rng_state`: ranks draw apart what is a rank's part, by one
  number of the program's; a device's generator goes on as it would have
- `dmp/wrap/values/initial_rules.py: torch.random.fork_rng`,
  `dmp/wrap/values/initial_rules.py: torch.default_generator.manual_seed`,
  `dmp/wrap/values/initial_values.py: torch.random.fork_rng`: a module's own rules draw its first values from torch's
  generator
- `sharders/torchrec/making.py: torch.random.fork_rng`: TorchRec's modules draw values that are overwritten
- `dmp/wrap/optimizers/optimizer_trial.py: torch.random.fork_rng`,
  `dmp/wrap/optimizers/optimizer_trial.py: torch.default_generator.manual_seed`: an optimizer is tried twice with
  random numbers of no program's
- `dmp/state/verify.py: torch.random.fork_rng`, `dmp/state/verify.py: torch.manual_seed`: both models draw the same
- `dmp/state/drawn.py: torch.default_generator.manual_seed`, `dmp/state/drawn.py: torch.set_rng_state`: what is drawn in
  a part of a DTensor is drawn by its place, and takes one number of the program's
- `dmp/random_numbers.py: torch.set_rng_state`, `dmp/random_numbers.py: random.setstate`: a look at a model, or at
  batches that are seen again, draws no numbers of the program, of NumPy's neither; and when a model is wrapped, ranks
  along a tensor axis go on from the first one's
- `sharders/managed_collision/reset.py: torch.random.fork_rng`,
  `sharders/managed_collision/reset.py: torch.manual_seed`,
  `sharders/managed_collision/eviction.py: torch.random.fork_rng`,
  `sharders/managed_collision/eviction.py: torch.manual_seed`: rows of evicted ids, and a user's filter of new ids, draw
  the same on every rank
- `sharders/testing/battery.py: torch.random.fork_rng`,
  `sharders/testing/checks.py: torch.default_generator.manual_seed`: a sharder is
  checked with the same numbers on all ranks

Others' objects
- `dmp/wrap/outer_wrappers.py: outer.__class__ =`: of one DDP around nothing but wrapped models, so that it passes calls
  on
- a module holds the wrapped model in its vars, as held_until_called, until that is called (dmp/live_models.py)
- `dmp/wrap/optimizers/keyed.py: optimizer.__class__ =`: of one optimizer of ours, so that it is one of TorchRec's too
- `dmp/ranks/groups.py: c10d._world.pg_group_ranks[made] =`: a group made without a collective, made known to torch
- `sharders/tensor_parallel/proof/simulated.py: propagator.propagate_op_sharding_non_cached =`: simulated ranks are
  threads, and torch's propagator is for one; lent under a lock, the first takes it and the last gives it back
- `sharders/data_parallel/fsdp_units.py: weight.__class__ =`: of one FSDP2 parameter of ours, so that what got no
  gradient is marked, and what a model writes into it lasts
- `sharders/tensor_parallel/split/replicated_weights.py: owner.__class__ =`: of one module of the user's model, so that
  its code reads a split weight as it was
- `sharders/tensor_parallel/split/attention.py: module.__class__ =`: of one attention of torch's in the user's model, so
  that its forward is one of some of its heads
- `sharders/tensor_parallel/split/own_heads.py: given.__class__ =`: of attention weights that a split attention gives
  out, so that what is computed of them is of all heads
- `sharders/tensor_parallel/split/own_parts.py: part.__class__ =`: of tensors that a branch of the user's model
  computes, while it runs, so that ranks draw apart what is their own, and what is read or kept of it is told
- `sharders/tensor_parallel/split/wide_norms.py: module.__class__ =`: of one norm of the user's model, so that its code
  takes statistics over all ranks' features
- `sharders/tensor_parallel/structure/claimed_width.py: module.__class__ =`: of one attention of the user's model that
  reads its width from its input, so that it is called between compiled graphs
- `sharders/tensor_parallel/structure/dry_run.py: modules[path].__class__ =`: of one module of a copy, to see what it
  reads
"""
