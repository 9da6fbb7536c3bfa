"""A running model in another plan. In reading order:

- `reshard`: a running model in another plan, step by step
- `next_plan`: whether a plan fits a model that is wrapped already, and what it changes
- `carried`: what tables carry along when their plan changes, in old and in new chunks
- `beside`: gradients and ordinary state of tables, known to all ranks
- `move_values`: those, moved from rank to rank
- `remade`: a sharded module of a stranger, made again for another plan
"""
