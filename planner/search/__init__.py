"""The search over options and ranks. Pure: it knows no table and no module. In reading order:

- `problem`: what the search is asked
- `cost_table`: what every option costs, as arrays
- `solve`: the search over options and ranks
- `cuts`: families cut evenly, and what that costs wherever it goes
- `starts`: which cut each item should get, before it is known where
- `placement`: where items are, and what ranks carry
- `potential`: what a placement costs, made smooth
- `packing`: the cut and the blocks of one item where they add least
- `hosts`: packing in two levels, where ranks are thousands
- `slots`: starts that say beforehand how long a rank may take for each phase
- `slotted`: packing of such a start
- `pieces`: which may change places, and what that gains
- `best`: the best placement so far, and its rivals
- `rivals`: placements that are improved beside each other, of which the better ones go on
- `improve`: units that pass to another rank, items that are put down anew
- `exact`: a placement of a small problem that fits, by an integer programme
- `tight`: packing by memory alone, and what is short where nothing fits
- `bound`: a lower bound on every placement
- `rounded`: the relaxed optimum that the bound is of, in whole items
- `guided`: starts like that optimum
- `bound_phases`: phases in which every rank's loads are in proportion, as one
- `bound_columns`: what an item may be given, in numbers of which every plan has at least as much
- `bound_counts`: how many pieces fit beside each other where a phase takes no longer than so long
- `bound_blocks`: pieces that leave no room on a rank for others, though a phase's mean has some
- `bound_programme`: a linear programme over columns, by interior points
- `bound_node`: a part of all plans, what it costs at least, and how it splits in two
- `bound_held`: a lower bound on the plans of which a sum is so much at least
"""

from planner.search.problem import Choice, Infeasible, Item, Option, Problem
from planner.search.solve import Solution, search

__all__ = ["Choice", "Infeasible", "Item", "Option", "Problem", "Solution", "search"]
