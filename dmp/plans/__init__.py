"""A layout for every parameter of a model, whether it fits, and what keeps a module from being a table. In reading
order:

- `plan`: `ShardingPlan`, layouts by parameter name
- `torchrec_plan`: plans to and from TorchRec's, by their rectangles
- `find`: which modules and weights the sharders take, found once
- `oddities`: what a module has with which no sharder takes it for tables
- `check`: whether a plan fits
- `kept_places`: where modules keep weights and modules beside their places
- `weight_readers`: who reads a weight besides its own module: such a one is no table
- `reachable`: the code that a model's forward may come to
- `private_state`: modules that learn from each rank's own ids, refused
- `remarks`: what a step's numbers do not show, said once
"""
