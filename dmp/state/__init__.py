"""What goes over the whole of a wrapped model: its state gathered, its gradients clipped and scaled, its numbers
verified. In reading order:

- `find_wrapped`: the wrapped models inside a module
- `dtensor_ranks`: the ranks that hold a module which nobody wrapped, by its DTensors
- `gather`: full state dicts
- `unsharded`: a plain module with the weights in place
- `local_chunks`: which chunks of its parameters a rank holds
- `optimizer_state`: optimizer state by name, in unsharded shapes
- `kinds`: torch's operations over lists of tensors, where some are DTensors
- `clip`: gradient clipping by the norm of the whole model, torch's function too
- `by_hand`: parts of tables that a program's own all-reduce or broadcast would mix
- `numbers`: numbers of Python's that a program takes of what is split
- `drawn`: what torch draws in DTensors on a CPU, by the place of each part
- `chunks_of_state`: state dicts of torch's optimizers and TorchRec's keyed ones, with chunks as chunks
- `strided_shards`: what torch reads and writes of weights that a rank holds several parts of
- `torch_state_dict`: torch's own functions for state dicts, which give whole tensors where these are asked for
- `snapshots`: torchsnapshot's reader, which asks by type
- `safetensors_files`: safetensors' own functions, which take whole tensors alone
- `trainer_saves`: Transformers' `Trainer`, which writes on one rank
- `keyed_clipping`: TorchRec's gradient clipping, refused where its norm would be another
- `scaler`: gradient scaling, one decision on all ranks
- `verify`: compares a sharded model with the plain one
"""
