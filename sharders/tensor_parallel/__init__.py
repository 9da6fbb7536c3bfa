"""Transformers split over the tensor axis, by a plan that is proved first. In reading order:

- `sharder`: `TensorParallelSharder`: decides, checks, splits
- `auto_plan`: a tensor-parallel plan from a model's structure
- `candidates`: in which ways each branch may be split
- `vocabulary`: styles of the token embedding and the head
- `left_whole`: what is left whole, in words
- `sequence`: completes a plan with its sequence-parallel parts
- `head_counts`: numbers of heads that become local
- `prove`: has a plan proved: on the whole model, else on the modules of it that run alone
"""
