"""Transformers split over the tensor axis by a plan that is proved first.

Read `sharder`, then `auto_plan` (the plan from a model's structure), `sequence`, `head_counts` and `prove`. Below them
`structure` says what a model is, `split` splits it, `proof` compares a small copy, whole and split.
"""
