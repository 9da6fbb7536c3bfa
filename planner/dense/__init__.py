"""Dense weights: how they lie on the mesh, and what their part of a step takes. In reading order:

- `modules`: which modules multiply by weights, look rows up, attend, or recompute
- `sequences`: how many tokens a sample has, as a module says it
- `model`: what of a module the cost of its dense part depends on, whatever the mesh
- `block`: `DenseBlock`, one decision and what it takes
- `placed`: blocks on a mesh: what a rank computes with, and what it keeps
- `time`: seconds of a step: products, collectives, and what of these compute hides
- `memory`: bytes of a rank: what stays, and what comes and goes
- `fitting`: whether that fits: an error where it is certain, a note where it is estimated
- `asked`: which layouts constraints allow
- `choose`: the choice that these open, by cost
- `changes`: what would make it fit
- `decide`: layouts of all dense weights, and what they take together
"""
