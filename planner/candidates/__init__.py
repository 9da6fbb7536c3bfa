"""What the planner may choose between. In reading order:

- `constraints`: what a user asks of the plan
- `movable`: layouts that may be put on other ranks
- `offered`: what a sharder offers, and why some of it may not be chosen
- `costed`: layouts with their costs
- `groups`: parameters that are placed as one
- `candidates`: what each parameter may get, as a problem for the search
"""
