"""The search over options and ranks. Pure: it knows no table and no module.

Read `problem`, then `solve`, which packs (`packing`), betters (`improve`) and bounds (`bound`).
"""

from planner.search.solve import Choice, Infeasible, Item, Option, Problem, Solution, search

__all__ = ["Choice", "Infeasible", "Item", "Option", "Problem", "Solution", "search"]
