"""What checkpoints are written to: whole when they appear, and nothing that is not ours replaced. In reading order:

- `target`: what a checkpoint's target must give; ours in one table, and those of other packages
- `native`: a folder of our own as a target: written beside its place, put there in one step
- `writer`: torch's writer of folders, aligned, and saying what went wrong
- `claim`: the right to save to a path, which one save has at a time
- `replaceable`: what a save may replace or remove
- `torch_save`: a `torch.save` file as a target
- `safetensors`: a Hugging Face folder of safetensors files as a target
- `mapped`: tensors on files of their own, for what is larger than memory
- `new_file`: a file that is whole when it appears
"""
