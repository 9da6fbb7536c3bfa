"""From a plain module to what a wrapped model is made of. In reading order:

- `arguments`: what the wrapper is given, checked before anything is changed
- `build`: from a plain module to a wrapped one, step by step
- `assembly`: what a wrapped model is made of, one frozen record
- `agreement`: what all ranks must share: model, plan, rank 0's values
- `data_parallel`: the data-parallel part: checked beforehand, started, started again
- `copying`: copies of a wrapped model on its mesh
- `loading`: a state dict into a wrapped model
- `ddp_watch`: whether DDP still has hold of the dense parameters
"""
