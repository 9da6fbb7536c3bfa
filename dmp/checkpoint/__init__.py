"""Checkpoints: saved, found again, loaded on any mesh and plan.

Read `api`, then a save (`save`, `claim`, `own_files`, `writer`, `background`, `retention`) or a load (`restore`,
`renaming`, `random_state`, and `sources` for what lies on the disk). `convert` and `export` need no model.
"""
