"""Which mesh a model would do best on. In reading order:

- `shapes`: the meshes that come into question
- `proposal`: `MeshProposal`, a mesh with what a step takes on it, and `MeshProposals`, several in order
- `study`: what all meshes share, and what one makes of it
- `propose`: `propose_mesh`, from a module and a number of devices to these
"""
