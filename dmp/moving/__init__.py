"""Tensors whose rectangles change their ranks: what goes where, and how it gets there. In reading order:

- `routes`: which part of whose rectangles goes to whom
- `mover`: takes it there, piece behind piece, in buffers of a few MB
"""
