"""What sample batches tell of ids: how many a sample has, how they repeat, which rows they name. In reading order:

- `row_curve`: which share of the ids falls into a range of rows
- `distinct_rows`: how many a step names, of more ids than one batch has
- `observation`: what was observed, as plain data
- `named_ids`: the named ids of a batch, whatever form it has
- `observe`: sample batches read, and what was seen of them
"""
