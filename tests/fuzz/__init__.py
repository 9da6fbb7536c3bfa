"""Seeded probes of what strangers do: odd batches, plans, meshes, files, ranks that part ways, misuse, whole programs.

Every probe must end, on every rank and within `LIMIT_S`, in one of two ways: a named error that changes nothing, or
the numbers of the unsharded module. `make fuzz SEED=...` prints the table; `test_fuzz.py` runs a sample and, under
slow, all.
"""
