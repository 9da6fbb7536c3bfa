"""A rank's rows: where they lie, how they are looked up and updated. In reading order:

- `row_optimizer`: what an optimizer of rows is
- `row_updates`: the updates, and whose formulas they are
- `optimizers`: which in-backward optimizers there are
- `given_optimizers`: what users give for one
- `pages`: large pages of memory under tables
- `reads`: what a lookup reads
- `bank`: storage of a rank's rectangles and optimizer state
- `kernels`: what a lookup kernel is, which there are, and which is used
- `fbgemm_kernel`: lookups and updates by FBGEMM on the CPU
- `torch_kernel`: lookups and updates in plain torch operations
- `threads`: parts of one piece of work on the threads of this process
- `numba_kernel`: lookups and updates by functions that numba compiles
- `numba_layout`: what compiled code is told of tables, bags and a call's ids
- `numba_training`: what is made of gradients by row: updates, sums, the gradient of all weights
- `numba_functions`: these functions by name, compiled once and kept
- `numba_kept`: machine code that is kept on disk
- `numba_loops`: sums over bags, and over the gradients of each distinct row
- `numba_updates`: what is done with the summed gradient of a row
- `numba_sort`: ids brought into the order of their rows
- `numba_distinct`: ids of segments brought down to distinct rows
- `numba_columns`: columns of several matrices placed in one
- `numba_partials`: partials added up where they belong
- `numba_blocks`: ids sorted by row block
- `numba_compile`: how functions are compiled
- `numba_vectors`: vectors, raw memory and prefetching for numba
- `distinct`: the distinct rows of ids, and which ids each stands for
- `bucketize`: sorts ids by the row block they lie in
"""
