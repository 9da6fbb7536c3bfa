"""Embedding tables on a mesh: one data path for all layouts, from ids to rows and back. In reading order:

- `collections`: TorchRec's two collections on a mesh
- `fused_collections`: their fused ones, whose optimizer is part of them
- `plain`: `nn.EmbeddingBag` and `nn.Embedding` on a mesh
- `as_written`: whether a module does what its class says, and nothing else
- `table_module`: what sharded embedding modules share
- `originals`: what a module is asked before a sharded one takes its place
- `successor`: who holds a module from before wrapping holds the sharded one
- `resting`: tables that are frozen, and may be trained later
- `representatives`: layouts of a table that stand for every way to cut it
- `torchrec_form`: what code written for TorchRec's sharded modules finds in ours
- `probe`: how long the data path takes, for a machine's figures
"""
