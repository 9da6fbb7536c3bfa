"""Embedding tables on a mesh: one data path for all layouts.

Read `placement` (terms: what is sent to whom), then a batch's way: `input_checks`, `input_dist`, `header`, `lookup`,
`pooled` and `pooled_output` or `unpooled` and `unpooled_output`, put together in `engine`. `table_module` is what
`collections` and `plain` share.
"""
