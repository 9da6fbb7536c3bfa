"""What a wrapped model's tensors hold: first values, whole tensors out of chunks, state dicts. In reading order:

- `skeleton`: a module's structure on meta, from which copies are made
- `since_split`: what was changed since the skeleton was made, for those copies
- `initial_rules`: which calls give a model's tensors their initial values, and what they give
- `initial_values`: initial values from (name, seed) alone, for meta parameters
- `filling`: what a sharder has made, checked, and filled where it was on meta
- `whole`: whole tensors out of the ranks' chunks
- `half_steps`: a save in the middle of a step
- `holders`: who has a table's other chunks, as what state dicts give knows
- `state_hooks`: how values get in and out of sharded modules
- `gathered`: weights that FSDP2 has left gathered, looked at without effect
- `taken`: when the parts of a state dict that is loaded were taken: at one time on all ranks
"""
