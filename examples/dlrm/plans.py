"""Plans made by hand for the example: one layout for all tables, or a mix, whatever the planner would choose."""

from __future__ import annotations

from collections.abc import Sequence

from dmp import Layout, ShardingEnv, column_wise, data_parallel, row_wise, table_wise

LAYOUTS = ("table_wise", "row_wise", "column_wise", "data_parallel", "mixed")


def make_plan(layout: str, tables: Sequence[str], env: ShardingEnv) -> dict[str, Layout]:
    """A plan that puts every table (given by parameter name) in the same layout; "mixed" goes round all four."""
    ranks = env.table_size
    plan: dict[str, Layout] = {}
    for i, name in enumerate(tables):
        chosen = LAYOUTS[i % 4] if layout == "mixed" else layout
        if chosen == "table_wise":
            plan[name] = table_wise(i % ranks)
        elif chosen == "row_wise":
            plan[name] = row_wise()
        elif chosen == "column_wise":
            plan[name] = column_wise([i % ranks, (i + 1) % ranks])
        else:
            plan[name] = data_parallel()
    return plan
