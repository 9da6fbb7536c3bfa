"""A layout for every parameter of a model, whether it fits, and what keeps a module from being a table. In reading
order:

- `plan`: `ShardingPlan`, layouts by parameter name
- `discovery`: which modules sharders take, and whether a plan fits
- `weight_readers`: who reads a weight besides its own module: such a one is no table
- `reachable`: the code that a model's forward may come to
- `private_state`: modules that learn from each rank's own ids, refused
- `left_out`: what a sharder might have taken and does not, said once
"""
