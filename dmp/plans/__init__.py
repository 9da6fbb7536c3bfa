"""A layout for every parameter of a model, and whether it fits.

Read `plan` (the data), `discovery` (which modules sharders take, and whether a plan fits them), then what keeps one
from being a table: `weight_readers` over `reachable`, `private_state`, `left_out`.
"""
