"""Why a plan is as it is: `report` in text, `page` as HTML, `infeasible` where there is none."""
