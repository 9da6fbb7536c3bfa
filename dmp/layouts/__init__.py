"""Where the rectangles of a parameter lie: a layout is what a user wrote, and resolves for a shape and a mesh. In
reading order:

- `cover`: whether rectangles cover a whole exactly once
- `integers`: what a person writes as numbers, checked
- `runs`: consecutive ranks, written short
- `shard`: a rectangle on a rank, and lists of them that cover a parameter
- `layout`: what every layout can say, and its form in JSON
- `tables`: layouts of tables, which name ranks
- `dense`: layouts of dense weights, which follow the mesh's axes
- `sharding_types`: TorchRec's names for rectangles
"""
