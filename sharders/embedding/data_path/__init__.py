"""One batch from ids to rows and back, forward and backward. In reading order:

- `engine`: the data path of one module, forward and backward
- `path`: what pooled and unpooled lookups share: the way back
- `pooled`: pooled lookups and their backward
- `whole`: lookups that travel with all their columns
- `way`: tables whose results travel alike, lookups to updates
- `unpooled`: unpooled lookups and their backward
"""
