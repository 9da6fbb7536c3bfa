"""Maps from raw ids to rows in front of sharded tables: TorchRec's managed collision on a mesh. In reading order:

- `sharder`: sharders of TorchRec's two modules, and where a map is
- `module`: the modules on a mesh: maps, then tables
- `id_map`: a rank's part of one map, and the history of the ids that came
- `policies`: eviction policies as scores
- `remap`: raw ids to rows, and when maps change
- `travel`: raw ids to the ranks that know them, and rows back
- `eviction`: which ids enter and leave a map, decided by all ranks together
- `entries`: entries of a map on their way between ranks
- `growth`: tables that get more rows
- `reset`: new values for rows whose raw id was evicted
"""
