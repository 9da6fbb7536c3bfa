"""What lies on a disk, read as tensors by name, never executed, and only inside its folder. In reading order:

- `source`: what a checkpoint's source must give
- `detect`: which kind of source lies at a path
- `native`: a folder of our own as a source
- `named_files`: files that a checkpoint names: regular ones, inside its folder
- `tensors_json`: which tensors a folder holds, and where: `tensors.json`
- `objects`: what a checkpoint holds that is no tensor, its form checked
- `checksums`: CRC-32 computed by several ranks
- `dcp`: any folder of torch's distributed checkpoint as a source
- `dcp_metadata`: torch's `.metadata`, a pickle, read as plain data
- `plain_pickle`: a pickle as plain data: nothing that it names is looked up or called
- `dcp_pieces`: where the pieces of torch's folders lie, and their checksums
- `archive`: one tensor's zip archive as torch.save writes it, read without unpacking or running it
- `stored_piece`: a piece as plain bytes in a file, of which a rank reads its rows
- `torch_save`: a `torch.save` file as a source
- `safetensors`: a safetensors file or Hugging Face folder as a source
- `safetensors_header`: a safetensors file's header, refused where the library refuses it
"""
