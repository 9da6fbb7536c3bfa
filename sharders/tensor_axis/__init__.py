"""Batches between the ranks of a tensor axis, which share them, and the data layout, in which they differ. In reading
order:

- `jagged`: jagged rows, and the same in a rectangle
- `batch_layout`: batches between the data and the tensor layout
"""
