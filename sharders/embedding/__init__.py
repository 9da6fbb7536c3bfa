"""Embedding tables on a mesh: one data path for all layouts, from ids to rows and back. In reading order:

- `collections`: TorchRec's two collections on a mesh
- `fused_collections`: their fused ones, whose optimizer is part of them
- `keyed_ids`: a `KeyedJaggedTensor`, read and checked
- `variable_batch`: a batch size for each feature: lengths padded, results given to the samples
- `plain`: `nn.EmbeddingBag` and `nn.Embedding` on a mesh
- `table_module`: what sharded embedding modules share
- `torchrec_form`: what code written for TorchRec's sharded modules finds in ours
- `unread_weight`: a table's parameter inside the forward: asked for its shape, never read
- `placement`: slots: what is sent to whom, in which order
- `peers`: who exchanges with whom on a mesh
- `engine`: the data path of one module, forward and backward
- `batch`: a batch as it is handed in, and checked and counted
- `call`: one batch on its way, and what was worked out of it
- `input_checks`: checks of a batch before any exchange
- `input_faults`: faults of a batch as integers that travel
- `header`: the first exchange: sizes, faults, mismatches
- `input_dist`: input dist: ids to the ranks that own their rows
- `local_tables`: what one rank holds of a module's tables
- `path`: what pooled and unpooled lookups share: the way back
- `pooled`: pooled lookups and their backward
- `codec`: how results and gradients travel
- `output_dist`: what both output dists share: results to their ranks, gradients back
- `pooled_output`: output dist of pooled lookups
- `unpooled`: unpooled lookups and their backward
- `unpooled_output`: output dist of unpooled lookups
- `replicas`: replicas and data-parallel tables kept equal
- `tensor_slice`: rows cut between the ranks of a tensor axis and gathered
"""
