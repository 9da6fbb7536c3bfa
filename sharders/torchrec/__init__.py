"""TorchRec's own sharders, taken where ours are. TorchRec is imported when one of them is met. In reading order:

- `adopt`: which of ours stands for which of theirs, with its options
- `wire_formats`: the codecs that their `qcomm_codecs_registry` names
- `data_parallel`: their default data-parallel wrapper
- `sharder`: `TorchRecSharder`, which runs what ours has no module for, by theirs
- `sharding_types`: a layout as one of their sharding types
- `refused`: what theirs gets wrong
- `making`: a sharded module of theirs, made
- `module`: that module in a wrapped model
- `resharded`: another of them, under another plan
- `averages`: dense parts behind its tables
- `batches`: batches before it sees them, and its results
- `local_shards`: what this rank holds of its state
- `fused_tables`: the tables that it updates in its backward pass
"""
