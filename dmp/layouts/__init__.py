"""Where the rectangles of a parameter lie.

A layout is what a user wrote; for a shape and a mesh it resolves to a list of `Shard`s that cover the parameter once.
Read `layout`, then `cover`.
"""
