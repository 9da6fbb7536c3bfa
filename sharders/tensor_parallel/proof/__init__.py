"""A plan proved on a small real copy: whole, and on ranks simulated in this process. Read `proof` first."""
