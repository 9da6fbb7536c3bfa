"""From a plain module to a wrapped one, and the wrapped one itself.

Read `wrapper` first: each step of its `__init__` is a file here. Before anything changes: `arguments`, `agreement`.
Values: `initial_rules`, `initial_values`, `filling`, `skeleton`, `ties`. Around the step: `forward`, `ddp_watch`,
`outer_wrappers`, `earlier_optimizers`, `optimizer_guard`, `fused`.
"""
