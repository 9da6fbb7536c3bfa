"""The search over options and ranks. Pure: it knows no table and no module. In reading order:

- `problem`: what the search is asked
- `solve`: the search over options and ranks
- `option_costs`: the options' costs as arrays
- `packing`: largest first onto the least loaded rank
- `improve`: moves and swaps that better a placement
- `bound`: a lower bound on every placement
"""

from planner.search.solve import Choice, Infeasible, Item, Option, Problem, Solution, search

__all__ = ["Choice", "Infeasible", "Item", "Option", "Problem", "Solution", "search"]
