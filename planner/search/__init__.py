"""The search over options and ranks. Pure: it knows no table and no module. In reading order:

- `problem`: what the search is asked
- `cost_table`: what every option costs, as arrays
- `solve`: the search over options and ranks
- `cuts`: families cut evenly, and what that costs wherever it goes
- `option_costs`: what options cost wherever they go
- `placement`: where items are, and where the next one costs least
- `packing`: largest first onto the least loaded rank
- `improve`: moves and other cuts that better a placement
- `bound`: a lower bound on every placement
- `bound_columns`: what an item may be given, in numbers of which every plan has at least as much
- `bound_programme`: a linear programme over columns, by interior points
- `bound_node`: a part of all plans, what it costs at least, and how it splits in two
"""

from planner.search.problem import Choice, Infeasible, Item, Option, Problem
from planner.search.solve import Solution, search

__all__ = ["Choice", "Infeasible", "Item", "Option", "Problem", "Solution", "search"]
