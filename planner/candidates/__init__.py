"""What may be chosen: `constraints`, `options` of tables, `offers` with their costs, `dense` weights."""
