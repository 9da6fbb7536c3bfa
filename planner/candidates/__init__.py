"""What the planner may choose between. In reading order:

- `constraints`: what a user asks of the plan
- `family`: layouts that differ only in cuts and places
- `movable`: a sharder's own layouts that may be put on other ranks
- `offered`: what a sharder offers, and why some of it may not be chosen
- `offer_table`: all offers, as arrays
- `costed`: offers with their costs
- `in_place`: pinned parameters
- `groups`: parameters that are placed as one
- `items`: parameters and groups as items of the search, with a table of their costs
- `candidates`: what each parameter may get, as a problem for the search
- `shortage`: what does not fit by bytes alone, and what surely does
- `request`: the tables to plan, and the plan that the search finds for them
- `trials`: whether a change is enough
- `changes`: what would make tables fit that do not
"""
