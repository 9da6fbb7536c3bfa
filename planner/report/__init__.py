"""Why a plan is as it is, or why there is none. In reading order:

- `report`: why a plan is as it is
- `summary`: from a solution to a report
- `page`: the report as a page of HTML
- `infeasible`: the error for a model that fits nowhere
"""
