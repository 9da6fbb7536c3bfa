"""What goes over the whole of a wrapped model: its state gathered, gradients clipped and scaled, numbers verified.

Read `find_wrapped`, `full_state`, `optimizer_state`, then any of the others.
"""
