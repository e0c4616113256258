"""A machine as the planner sees it: facts, rates, and the record of an examination."""
