"""Tensors whose rectangles change their ranks: what goes where, and how it gets there. In reading order:

- `routes`: which part of whose rectangles goes to whom
- `buffers`: pieces of tensors, one behind the other
- `mover`: takes it there, in buffers of a few MB
"""
