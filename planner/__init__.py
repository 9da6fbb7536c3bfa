"""Chooses a layout for every parameter that a sharder takes: the sharders' options, a model's costs, a search.

Rooms: `costs`, `observed`, `candidates`, `search`, `dense`, `report`, `meshes`. Single files:

- `planner`: `ShardingPlanner`, from module to plan
- `question`: what a planner is asked, read and checked
- `replica_groups`: what the same ranks would do in other replica groups
- `in_backward`: what an optimizer in the backward pass would save, and which tables are frozen
- `frozen_copies`: tables of a teacher, planned where the model's are
- `largest_batch`: how large a batch a plan has room for
- `pinned`: entries of a plan that a user has fixed
- `torchrec`: `from_torchrec`, what TorchRec's planner is made of as ours
- `torchrec_parts`: its constraints, topologies and reservations as ours
- `broadcast`: rank 0's plan to all ranks
- `one_thread`: NumPy's products on one thread meanwhile
- `arguments`: numbers and names that a user passes, checked
"""

from __future__ import annotations

from planner.candidates.constraints import Constraint
from planner.costs.cost_model import CostModel
from planner.costs.topology import Topology
from planner.meshes.proposal import MeshProposal, MeshProposals
from planner.meshes.propose import propose_mesh
from planner.observed.observation import Observation
from planner.observed.observe import observe
from planner.planner import ShardingPlanner
from planner.report.report import PlanReport
from planner.torchrec import from_torchrec

__all__ = ["Constraint", "CostModel", "PlanReport", "ShardingPlanner", "Topology", "from_torchrec"]
__all__ += ["MeshProposal", "MeshProposals", "Observation", "observe", "propose_mesh"]
