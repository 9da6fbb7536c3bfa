"""Batches between the ranks of a tensor axis, which share them, and the data layout, in which they differ."""
