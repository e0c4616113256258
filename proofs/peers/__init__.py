"""Rounds of peers under kills, joins, leaves and bad differences."""
