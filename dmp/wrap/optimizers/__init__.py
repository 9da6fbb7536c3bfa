"""Optimizers of a wrapped model: views of those in the backward pass, and a watch over all others. In reading order:

- `given_optimizers`: ordinary optimizers that a user passes, and those inside them
- `fused`: the optimizer view of what is updated in the backward pass
- `live_state`: its state by parameter, read when it is asked for
- `keyed`: the same optimizer in TorchRec's class
- `column_blocks`: row-wise optimizer state of a table whose columns are cut, in each of its forms
- `optimizer_trial`: whether an optimizer that nobody knows is right on pieces, tried on small ones
- `optimizer_guard`: optimizers that are wrong on pieces, refused
- `drifted`: copies of weights that are not the same on all ranks
- `repeated_samples`: ranks that should have samples of their own, and were all called with the same
- `step_turns`: steps of optimizers, made by all ranks alike or told
- `backward_errors`: errors that leave a backward pass: noted, and of plain tensors beside DTensors said in words
"""
