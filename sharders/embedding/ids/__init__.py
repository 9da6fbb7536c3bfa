"""From ids to the ranks that own their rows: the first half of a batch's way. In reading order:

- `call`: one batch on its way, and what was worked out of it
- `header`: the first exchange: sizes, faults, mismatches
- `packing`: ids packed for all ranks in one compiled call
- `input_dist`: input dist: ids to the ranks that own their rows
- `received`: what has come of all ranks' batches
- `told_rows`: rows that training batches read, told to who watches them
"""
