"""A model split by the styles of a plan. Read `styles`, `patterns`, `split`, then `hooks`, `replicated_weights`."""
