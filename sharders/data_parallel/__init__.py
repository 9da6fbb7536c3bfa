"""What no sharder owns: replicated, or fully sharded. In reading order:

- `ddp`: DDP for what no sharder owns
- `fsdp`: `FSDPWrapper`: FSDP2, HSDP, or DDP by the mesh
- `options`: options of these that cannot be
- `agreed_order`: that ranks exchange for the same units, in the same order
- `fsdp_units`: the units of a model that FSDP2 has split, and their weights
- `classes`: modules whose class does not begin with `nn.Module`
- `blocks`: repeated blocks: units of FSDP2, checkpointing, compilation
- `in_turn`: whether all ranks run each module of a list, a dict or a branch
- `reads_all`: models whose forward goes over all their parameters
- `asked`: gradients of some weights alone, for which torch is asked
- `twice`: backward passes through backward passes
- `computed_again`: units that a backward pass computes again more than once
- `cast_inside`: weights that the model casts while they are gathered
- `written_inside`: weights that the model writes while they are gathered
- `past_hooks`: modules that are run past the hooks by which FSDP2 gathers their weights
- `read_outside`: methods that read a weight past the forward
- `replaced`: others that were put in the place of weights: taken for good, for one call, or refused
- `unreached`: gradients of dense parameters that the loss does not reach
- `whole`: gradients of weights that lie whole where the others are split, in one exchange
- `sparse_rows`: gradients of tables that stay whole with `sparse=True`, by the rows that batches touch
- `static_graph`: torch's own treatment of a graph that stays the same
- `pass_end`: what a backward pass runs at its end, and whether it raised before
- `unfinished`: gradients that are not averaged yet
- `cleared`: those that a program has cleared by hand
- `later_hooks`: users' hooks on gradients, which run when these are averaged
- `updated`: dense parameters that an optimizer updates in the backward pass
- `buffers`: buffers of copies, which are rank 0's
"""
