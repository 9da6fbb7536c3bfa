"""A model split in place by the styles of a plan. In reading order:

- `styles`: style names, and what each does to weights
- `patterns`: from patterns or a `tp_plan` to a style for each module
- `split`: splits a model in place by styles, and its numbers of heads
- `hooks`: activations moved where torch has no style for it
- `local`: Linears of several weights in one, or of (in, out), which torch's styles do not split
- `attention`: torch's `nn.MultiheadAttention` with a rank's heads alone
- `attention_weights`: attention weights of all heads, where a model gives them out
- `own_heads`: what is of a rank's own heads, until something is computed of it
- `own_parts`: what is computed of a rank's part, followed; drawn apart by rank
- `followed`: branches in which parts are followed, and what is told of them
- `program_hooks`: the program's own hooks on what is split, behind all others; backward hooks, told of parts
- `looked_at`: programs' hooks on split Linears, which see what all ranks have
- `wide_norms`: norms over all features, of which a rank has a part
- `mixtures`: experts, by the inner size of each
- `same_samples`: ranks that call a split model with different samples, told
- `same_gradients`: whole weights whose gradients part under a plan that is not proved, told
- `plain`: plain tensors into code that runs on a rank's part, and out of it
- `shared_keys`: latent attentions, of whose key all heads share a part
- `replicated_weights`: whole weights beside split ones, which the model reads as plain tensors
- `twice`: gradients of gradients
"""
