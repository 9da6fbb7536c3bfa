"""What comes into a collection: batches of ids, read and checked. In reading order:

- `keyed_ids`: a `KeyedJaggedTensor`, read and checked
- `variable_batch`: a batch size for each feature: lengths padded, results given to the samples
- `batch`: a batch as it is handed in, and checked and counted
- `input_checks`: checks of a batch before any exchange
- `input_faults`: faults of a batch as integers that travel
"""
