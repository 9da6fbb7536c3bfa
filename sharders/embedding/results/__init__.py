"""From rows back to the samples that asked for them. In reading order:

- `partials`: what travels of bags whose rows lie on several ranks
- `columns`: columns of several matrices placed in one
- `partial_columns`: columns that are sums of partials
- `pooled_output`: output dist of pooled lookups
- `ragged`: what travels where features have batch sizes of their own
- `row_moves`: rows read for ids, and gradients of ids summed for their rows
- `row_places`: where the rows that come back for ids belong
- `unpooled_output`: output dist of unpooled lookups
"""
