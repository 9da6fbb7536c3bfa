"""A rank's rows: where they lie, how they are looked up and updated.

Read `optimizers` and `bank`, then `kernels`, which chooses between `fbgemm_kernel` and `torch_kernel`; `bucketize`
sorts ids by the row block they lie in.
"""
