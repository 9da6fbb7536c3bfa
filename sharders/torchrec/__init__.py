"""TorchRec's own sharders, taken where ours are. TorchRec is imported when one of them is met. In reading order:

- `adopt`: which of ours stands for which of theirs, with its options
- `wire_formats`: the codecs that their `qcomm_codecs_registry` names
- `sharder`: `TorchRecSharder`, which runs what ours has no module for
"""
