"""From a plain module to a wrapped one, and the wrapped one itself. In reading order:

- `wrapper`: `DistributedModelParallel`, the wrapped model as a module
- `arguments`: what the wrapper is given, checked before anything is changed
- `build`: from a plain module to a wrapped one, step by step
- `assembly`: what a wrapped model is made of, one frozen record
- `agreement`: what all ranks must share: model, plan, rank 0's values
- `skeleton`: a module's structure on meta, from which copies are made
- `initial_rules`: which calls give a model's tensors their initial values, and what they give
- `initial_values`: initial values from (name, seed) alone, for meta parameters
- `filling`: what a sharder has made, checked, and filled where it was on meta
- `state_hooks`: how values get in and out of sharded modules
- `gathered`: weights that FSDP2 has left gathered, looked at without effect
- `data_parallel`: the data-parallel part: checked beforehand, started, started again
- `copying`: copies of a wrapped model on its mesh
- `loading`: a state dict into a wrapped model
- `reshard`: a running model in another plan, step by step
- `next_plan`: whether a plan fits a model that is wrapped already, and what it changes
- `carried`: what tables carry along when their plan changes, in old and in new chunks
- `move_values`: those, moved from rank to rank
- `given_optimizers`: ordinary optimizers that a user passes, and those inside them
- `forward`: `model.forward`, with the signature of the module's own
- `ddp_watch`: whether DDP still has hold of the dense parameters
- `fused`: the optimizer view of what is updated in the backward pass
- `column_blocks`: row-wise optimizer state of a table whose columns are cut, in each of its forms
- `earlier_optimizers`: optimizers that were made before wrapping
- `optimizer_guard`: optimizers that are wrong on pieces, refused
- `live_models`: the wrapped models of this process
- `outer_wrappers`: DistributedDataParallel around wrapped models: left alone, or refused
"""
