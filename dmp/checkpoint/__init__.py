"""Checkpoints: saved, found again, loaded on any mesh and plan. In reading order:

- `api`: save and load, on any mesh and plan
- `save`: collects, writes beside the path, puts in place
- `own_files`: what a save of ours writes: only that is replaced or removed
- `claim`: the right to save to a path, which one save has at a time
- `writer`: torch's writer of folders, aligned, and saying what went wrong
- `background`: a save in the background
- `retention`: a folder of checkpoints: the newest whole one, and which may go
- `restore`: checks a checkpoint against a model, then says what to read where
- `renaming`: a checkpoint's names fitted to a model's
- `random_state`: random state in a checkpoint
- `convert`: one kind of checkpoint to another, without a model
- `export`: weights to safetensors files in Hugging Face's layout
"""
