"""Checkpoints: saved, found again, loaded on any mesh and plan. In reading order, after `sources` and `targets`:

- `place`: where a checkpoint lies
- `api`: save and load, on any mesh and plan
- `save`: collects what a model holds, has it written, lets older ones go
- `background`: a save in the background
- `retention`: a folder of checkpoints: the newest whole one, and which may go
- `restore`: checks a checkpoint against a model, then says what to read where
- `renaming`: a checkpoint's names fitted to a model's
- `random_state`: random state in a checkpoint
- `convert`: one kind of checkpoint to another, without a model
- `export`: weights to safetensors files in Hugging Face's layout
"""
