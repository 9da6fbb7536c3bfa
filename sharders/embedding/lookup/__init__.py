"""A rank's rows: where they lie, how they are looked up and updated. In reading order:

- `row_optimizer`: what an optimizer of rows is
- `row_updates`: the updates, and whose formulas they are
- `optimizers`: which in-backward optimizers there are
- `given_optimizers`: what users give for one
- `bank`: storage of a rank's rectangles and optimizer state
- `kernels`: what a lookup kernel is, which there are, and which is used
- `fbgemm_kernel`: lookups and updates by FBGEMM on the CPU
- `torch_kernel`: lookups and updates in plain torch operations
- `bucketize`: sorts ids by the row block they lie in
"""
