"""What a transformer is made of, by structure, and what its shapes are when it runs. In reading order:

- `transformer`: what a transformer is made of
- `linears`: what multiplies by one matrix
- `experts`: experts of a mixture, whose weights are stacks of matrices
- `claimed_width`: attentions that read their width from their input
- `sources`: the code of a module's class
- `numbers`: integer attributes of modules and of their configurations
- `latent`: attentions whose keys and values come of one short vector
- `adapters`: Linears with low-rank pairs beside them
- `of_heads`: values that an attention has for each of its heads
- `wide_norms`: norms over all that the Linears of a branch give
- `of_samples`: Linears that give one vector for each sample
- `beside`: Linears that an attention has beside query, key, value and output
- `attentions`: attentions of a model, by structure
- `find_transformer`: finds that in a model, by structure
- `meta_copies`: copies of a model on meta
- `caches`: what functions of a model keep, and a run on meta would leave there
- `dry_run`: a model run on meta with its local shapes
- `feeds`: inputs that a model is tried with
"""
