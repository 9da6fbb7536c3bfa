"""What lies where on a mesh, and how ranks exchange what they look up, gradients and touched rows. In reading order:

- `placement`: slots: what is sent to whom, in which order
- `peers`: who exchanges with whom on a mesh
- `phases`: phases of a step, profiled and counted under the report's names
- `stages`: results of row blocks on two shard axes, in two stages or straight, table by table
- `local_tables`: what one rank holds of a module's tables
- `codec`: how results and gradients travel
- `output_dist`: what both output dists share: results to their ranks, gradients back
- `touched_rows`: gradients of data-parallel tables by the rows that batches touch
- `replicas`: replicas and data-parallel tables kept equal
- `tensor_slice`: rows cut between the ranks of a tensor axis and gathered
"""
