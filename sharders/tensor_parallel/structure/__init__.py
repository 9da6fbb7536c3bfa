"""What a transformer is made of, by structure, and what its shapes are when it runs. In reading order:

- `find_transformer`: the parts of a transformer, by structure
- `dry_run`: a model run on meta with its local shapes
"""
