"""A plan proved on a small real copy: whole, and split on ranks that are simulated in this process. In reading order:

- `proof`: compares outputs and gradients of simulated ranks with those of the whole module
- `sample`: a small real copy of a module, with inputs, that a plan is proved on
- `narrow`: makes a copy of a large transformer narrower: the same operations on fewer features
- `simulated`: the ranks of a tensor group in one process: threads that take turns
"""
