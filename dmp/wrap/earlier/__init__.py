"""What programs held before wrapping: parameters, optimizers, hooks; carried over, or told. In reading order:

- `earlier_optimizers`: optimizers that were made before wrapping
- `asked_earlier`: gradients asked for of weights that wrapping has replaced
- `written_earlier`: parameters that wrapping has replaced, written by who held them
- `parameter_hooks`: users' hooks and attributes of parameters, carried to those that take their places
- `let_go`: tables from before wrapping, which torch keeps for as long as the process lives: let go of
"""
