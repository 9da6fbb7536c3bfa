"""A rank's rows: where they lie, how they are looked up and updated. In reading order:

- `optimizers`: in-backward optimizers and their row updates
- `bank`: storage of a rank's rectangles and optimizer state
- `kernels`: what a lookup kernel is, which there are, and which is used
- `fbgemm_kernel`: lookups and updates by FBGEMM on the CPU
- `torch_kernel`: lookups and updates in plain torch operations
- `bucketize`: sorts ids by the row block they lie in
"""
