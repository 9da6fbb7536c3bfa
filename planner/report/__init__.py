"""Why a plan is as it is, or why there is none. In reading order:

- `words`: numbers, ranks and layouts as a person reads them
- `progress`: a line on the terminal while planning works
- `setting`: what was planned, and for what
- `offers`: what each class of parameters was offered
- `planned`: what each parameter got, and where it lies
- `merged`: phases under their names
- `traffic`: what is sent for planned parameters
- `figures`: all that a report says, as numbers
- `rank_groups`: ranks that are loaded alike
- `reasons`: why an option was not taken
- `explained`: what a parameter got and what it did not
- `text`: a report as text
- `difference`: what changes from one plan to another
- `stored`: a report as JSON and back
- `svg`: shapes of the page's pictures
- `mesh_picture`: hosts and ranks, coloured by load
- `heat_map`: which table is where
- `bars`: rows of stacked bars
- `profile`: the load of all ranks in order
- `page`: the report as a page of HTML
- `report`: why a plan is as it is
- `summary`: from a solution to a report
- `infeasible`: the error for a model that fits nowhere
"""
