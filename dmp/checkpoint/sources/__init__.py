"""What lies on a disk, read as tensors by name and never executed.

Read `source` (what one must give) and `detect` (which one a path is), then one format: `native`, `dcp`, `torch_save`,
`safetensors`. Below them: `dcp_metadata` and `plain_pickle`, `archive`, `dcp_chunks`, `stored_chunk`, `tensors_json`.
"""
