"""Charts and markup of the report, without scripts."""
