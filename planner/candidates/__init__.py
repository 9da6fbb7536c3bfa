"""What the planner may choose between. In reading order:

- `constraints`: what a user asks of the plan
- `options`: layouts that may be chosen, and how they may move
- `offers`: each parameter's options with their costs
- `dense`: dense weights: what is split, and what it takes
"""
